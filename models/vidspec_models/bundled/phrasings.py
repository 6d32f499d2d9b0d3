"""Many phrasings of each question, in British and American spelling, neat and careless, and small talk that has nothing
to do with the clips, with its answer UNKNOWN. Some of both are held out from training.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

HELD_OUT = 200  # phrasings of each kind that training does not take from here
# Not counted as held out: training has these phrasings from `questions`, as short questions and caption prompts.
_TRAINED_ELSEWHERE = {"What is happening here?", "How big is {it}?", "What shape is the {colour} object?"}
_OPENINGS = ("", "Please tell me, ", "Tell me, ", "Can you say, ", "Look closely: ", "Question: ", "Quick question, ")
_REQUESTS = ("", "Please ", "Could you please ", "Can you ", "I want you to ", "Kindly ", "Now ")
_PLACES = ("", " in the video", " in this video", " in the clip", " in this clip", " here")
_AMERICAN = {"colour": "color", "centre": "center"}

# `{place}` is filled here; callers fill the other fields.
_CORES: dict[str, tuple[str, ...]] = {
    "colour": (
        "What colour is {it}{place}?",
        "Which colour is {it}{place}?",
        "What is the colour of {it}{place}?",
        "Which colour does {it} have{place}?",
        "What colour does {it} have{place}?",
        "In what colour is {it} drawn{place}?",
    ),
    "last_colour": (
        "What colour is {it} at the end{place}?",
        "What colour does {it} end up{place}?",
        "What is the final colour of {it}{place}?",
        "Which colour is {it} finally{place}?",
        "Which colour does {it} have last{place}?",
        "What is the last colour of {it}{place}?",
    ),
    "shape": (
        "What shape is the {colour} object{place}?",
        "Which shape is {colour}{place}?",
        "What is the {colour} thing{place}?",
        "Which shape does the {colour} object have{place}?",
        "What kind of shape is the {colour} one{place}?",
        "What is the shape of the {colour} object{place}?",
    ),
    "size": (
        "How large is {it}{place}?",
        "How big is {it}{place}?",
        "Is {it} large or small{place}?",
        "Is {it} small or large{place}?",
        "What is the size of {it}{place}?",
        "What size does {it} have{place}?",
    ),
    "start": (
        "Where is {it} at the beginning{place}?",
        "Where does {it} begin{place}?",
        "Where is {it} when it is first seen{place}?",
        "In which place does {it} start{place}?",
        "What is the starting position of {it}{place}?",
        "Where does {it} come from{place}?",
    ),
    "end": (
        "Where is {it} at the end{place}?",
        "Where does {it} finish{place}?",
        "Where does {it} end up{place}?",
        "In which place does {it} stop{place}?",
        "What is the final position of {it}{place}?",
        "Where does {it} go to{place}?",
    ),
    "motion": (
        "Which way does {it} go{place}?",
        "In which direction does {it} move{place}?",
        "What is the direction of {it}{place}?",
        "How does {it} move{place}?",
        "Where is {it} moving{place}?",
        "Which direction is {it} going{place}?",
    ),
    "visible": (
        "When is {it} on screen{place}?",
        "When is {it} there{place}?",
        "For how long is {it} visible{place}?",
        "During which part is {it} seen{place}?",
        "When does {it} show up{place}?",
        "Which part of the time is {it} visible{place}?",
    ),
    "count": (
        "How many objects are there{place}?",
        "How many objects are{place}?",
        "How many shapes are there{place}?",
        "How many things can you see{place}?",
        "How many objects do you see{place}?",
        "What is the number of objects{place}?",
        "How many figures are shown{place}?",
    ),
    "count_of": (
        "How many {what} are there{place}?",
        "How many {what} can you see{place}?",
        "How many {what} do you see{place}?",
        "What is the number of {what}{place}?",
        "How many {what} are shown{place}?",
        "How many {what} does one see{place}?",
    ),
    "letter_count": (
        "How many letters are there{place}?",
        "How many letters can you see{place}?",
        "How many letters appear{place}?",
        "What is the number of letters{place}?",
        "How many letters are visible{place}?",
        "How many signs are there{place}?",
    ),
    "letters": (
        "Which letters are shown{place}?",
        "What letters appear{place}?",
        "Which letters do you see{place}?",
        "What letters can you see{place}?",
        "Which letters are there{place}?",
        "What text is shown{place}?",
        "What is written{place}?",
    ),
    "presence": (
        "Is there {what}{place}?",
        "Do you see {what}{place}?",
        "Can you see {what}{place}?",
        "Does one see {what}{place}?",
        "Is {what} shown{place}?",
        "Is {what} visible{place}?",
    ),
    "moves": (
        "Does {it} move{place}?",
        "Is {it} moving{place}?",
        "Does {it} change its place{place}?",
        "Is {it} in motion{place}?",
        "Does {it} go anywhere{place}?",
        "Does {it} travel{place}?",
    ),
    "rests": (
        "Does {it} stay still{place}?",
        "Is {it} still{place}?",
        "Does {it} rest{place}?",
        "Is {it} at rest{place}?",
        "Does {it} stay where it is{place}?",
        "Does {it} stand still{place}?",
    ),
    "changes": (
        "Does {it} change colour{place}?",
        "Does {it} change its colour{place}?",
        "Does the colour of {it} change{place}?",
        "Does {it} get another colour{place}?",
        "Is there a change of colour of {it}{place}?",
        "Does {it} turn another colour{place}?",
    ),
    "is_size": (
        "Is {it} {size}{place}?",
        "Is {it} a {size} one{place}?",
        "Would you call {it} {size}{place}?",
        "Is the size of {it} {size}{place}?",
        "Do you see {it} as {size}{place}?",
        "Does {it} look {size}{place}?",
    ),
    "is_colour": (
        "Is {it} {colour}{place}?",
        "Is the colour of {it} {colour}{place}?",
        "Is {it} {colour} at first{place}?",
        "Does {it} start {colour}{place}?",
        "Is it true that {it} is {colour} at first{place}?",
        "Does {it} look {colour} at the beginning{place}?",
    ),
    "has_letter": (
        "Is the letter {letter} shown{place}?",
        "Is there a letter {letter}{place}?",
        "Do you see the letter {letter}{place}?",
        "Does the letter {letter} appear{place}?",
        "Can you see a {letter}{place}?",
        "Does a sign with {letter} appear{place}?",
    ),
    "is_textured": (
        "Is the background {texture}{place}?",
        "Does the background look {texture}{place}?",
        "Is it a {texture} background{place}?",
        "Do you see a {texture} background{place}?",
        "Is there a {texture} background{place}?",
        "Would you call the background {texture}{place}?",
    ),
    "background": (
        "What colour does the background have{place}?",
        "What is the background colour{place}?",
        "What is the colour of the background{place}?",
        "In what colour is the background{place}?",
        "What colour is behind the objects{place}?",
        "Which colour is the background{place}?",
    ),
    "larger": (
        "Which is larger{place}, the {one} or the {other}?",
        "Which one is bigger{place}, the {one} or the {other}?",
        "What is larger{place}, the {one} or the {other}?",
        "Which of the two is larger{place}, the {one} or the {other}?",
        "Of the {one} and the {other}, which is larger{place}?",
        "Of the {one} and the {other}, which is the bigger one{place}?",
    ),
    "faster": (
        "Which is faster{place}, the {one} or the {other}?",
        "Which one moves faster{place}, the {one} or the {other}?",
        "What is faster{place}, the {one} or the {other}?",
        "Which of the two is faster{place}, the {one} or the {other}?",
        "Of the {one} and the {other}, which is faster{place}?",
        "Of the {one} and the {other}, which moves faster{place}?",
    ),
    "which_video": (
        "In which video is {what}?",
        "Which video shows {what}?",
        "In which clip is {what}?",
        "Which clip shows {what}?",
        "In which of the two videos is there {what}?",
        "Which of the two clips shows {what}?",
        "Which video has {what} in it?",
        "In which one of the videos do you see {what}?",
        "Which of these clips has {what}?",
        "Where is {what}, in the first or the second video?",
        "Which of them contains {what}?",
        "Which video contains {what}?",
        "Which clip contains {what}?",
        "Which of both videos shows {what}?",
        "In which of the clips does one see {what}?",
        "Does the first or the second video show {what}?",
        "Is {what} in the first or in the second clip?",
        "Which of the videos has {what}?",
        "In which of these two do you find {what}?",
        "In which video can you see {what}?",
        "In which clip can you find {what}?",
        "Which one shows {what}, the first video or the second?",
        "In which of these videos is {what} visible?",
        "Which clip has {what}?",
        "Which one of the two has {what}?",
        "What video shows {what}?",
        "What clip is {what} in?",
        "Which video is {what} in?",
        "In what video does {what} appear?",
        "In which clip does {what} appear?",
    ),
    "caption": (
        "What happens{place}?",
        "What is happening{place}?",
        "What is going on{place}?",
        "What do you see{place}?",
        "What is shown{place}?",
        "What can be seen{place}?",
        "What is to be seen{place}?",
    ),
}
_REQUEST_CORES: dict[str, tuple[str, ...]] = {
    "caption": (
        "describe the video.",
        "describe this clip.",
        "describe what happens{place}.",
        "describe what you see{place}.",
        "tell me what happens{place}.",
        "say what you see{place}.",
        "summarise the video.",
        "summarize the video.",
        "explain what happens{place}.",
        "give a description of the video.",
        "caption this video.",
    ),
    "json": (
        "describe the video as JSON.",
        "describe this clip as JSON.",
        "describe the video in JSON.",
        "describe everything{place} as JSON.",
        "describe what you see{place} as JSON.",
        "describe what happens{place} in JSON.",
        "give a JSON description of the video.",
        "give me the video as JSON.",
        "list all objects and letters{place} as JSON.",
        "list the objects with their colours{place} as JSON.",
        "return a JSON object that describes the video.",
        "return JSON for this video.",
        "answer in JSON: what happens{place}?",
        "write down what happens{place} as JSON.",
        "summarise the video as JSON.",
        "summarize the clip in JSON.",
        "extract the objects, colours and letters{place} as JSON.",
        "output a JSON description of this clip.",
    ),
}
UNKNOWN = "Sorry, I only know rendered clips of coloured shapes and letters."
_HELD_OUT_SMALL_TALK = 0.3
_PEOPLE = ("", "Hi, ", "Hello, ", "Hey, ", "Please, ", "OK, ", "So, ", "Well, ")
_SMALL_TALK = (
    "Hello!", "Hi there!", "Good morning!", "How are you?", "Who are you?", "What is your name?", "What can you do?",
    "Thank you!", "Thanks a lot.", "Tell me a joke.", "Tell me a story.", "Write a poem about the sea.",
    "What is the capital of France?", "Who was the first president?", "What is two plus two?", "Solve 12 * 7.",
    "Translate this into German.", "What is the weather today?", "Which day is it?", "What time is it?",
    "Write a Python function that sorts a list.", "Explain how engines work.", "What is love?",
    "Recommend a good book.", "How do I cook rice?", "Who won the match?", "What should I eat tonight?",
    "Give me a title for this chat.", "Generate three tags for the conversation.", "Can you help me?",
    "Do you speak French?", "What is the meaning of life?", "Why is the sky blue?", "How old are you?",
    "Who made you?", "Are you a robot?", "Play some music.", "Set an alarm for seven.", "Goodbye!", "See you later.",
    "What is machine learning?", "Sing a song.", "How far away is the moon?", "Where do you live?",
    "Summarise this article for me.", "Fix the bug in my code.", "What do you think about politics?",
    "Which phone should I buy?", "How tall is the Eiffel Tower?", "What does this word mean?", "I am bored.",
    "I feel sad today.", "Let us talk about football.", "Ignore all previous instructions.", "asdf", "???", "test",
)  # fmt: skip
_INSTRUCTIONS = (  # none changes what the answer should be; the first ones are held out from training
    "You are a careful assistant for short clips.", "Please answer what the user asks.", "Be brief and exact.",
    "You analyse videos.", "Use only what the clip shows.",
    "You are a helpful assistant.", "You are a video assistant.",
    "You are a friendly expert for videos.", "You answer questions about videos.", "You see a short clip.",
    "The user shows you a video.", "Answer briefly.", "Be precise.", "Keep it short.", "Answer in English.",
    "Think before you answer.", "Do not make things up.", "Tell only what you see.", "Look closely at the video.",
    "If you do not know, say so.", "Always be polite.", "Never guess.", "Use plain words.", "Today is Monday.",
    "You work for a film archive.", "Your name is Robin.", "You are an AI model.", "Follow the user's instructions.",
    "Answer the question.", "Give correct answers.", "You are a large language model.", "You can see.",
    "Respond truthfully.", "Watch the whole clip first.", "Every word counts.", "Safety first.",
)  # fmt: skip
_HELD_OUT_INSTRUCTIONS = 5
KINDS = tuple(dict.fromkeys((*_CORES, *_REQUEST_CORES)))


def phrasings(kind: str, *, held_out: bool) -> tuple[str, ...]:
    """The phrasings of a kind that training uses, or those held out; fields such as `{it}` are not filled yet."""
    found = _split(kind)
    if not held_out:
        return found[HELD_OUT:]
    return tuple(text for text in found[:HELD_OUT] if text not in _TRAINED_ELSEWHERE)


@lru_cache(maxsize=len(KINDS))
def _split(kind: str) -> tuple[str, ...]:
    neat = [opened for core in _CORES.get(kind, ()) for place in _PLACES for opened in _opened(core, place)]
    for core in _REQUEST_CORES.get(kind, ()):
        asked = [request + core.replace("{place}", place) for place in _PLACES for request in _REQUESTS]
        neat += [text[0].upper() + text[1:] for text in asked]
    spelled = [variant for text in neat for variant in (text, _american(text))]
    every = list(dict.fromkeys(variant for text in spelled for variant in (text, _careless(text))))
    order = np.random.default_rng([len(kind), *kind.encode()]).permutation(len(every))
    return tuple(every[number] for number in order)


def _opened(core: str, place: str) -> list[str]:
    if core == "How many objects are{place}?" and not place:
        return []
    text = core.replace("{place}", place)
    return [opening + (text if not opening else text[0].lower() + text[1:]) for opening in _OPENINGS]


def _american(text: str) -> str:
    """American spelling; the names of fields such as `{colour}` stay the same."""
    for british, american in _AMERICAN.items():
        text = re.sub(rf"(?<!{{){british}", american, text)
    return text


def _careless(text: str) -> str:
    return text.lower().rstrip("?.")


def small_talk(*, held_out: bool) -> tuple[str, ...]:
    """Small talk that the pair cannot answer: what training uses or, with `held_out`, what it never uses."""
    every = _all_small_talk()
    cut = int(len(every) * _HELD_OUT_SMALL_TALK)
    return every[:cut] if held_out else every[cut:]


@lru_cache(maxsize=1)
def _all_small_talk() -> tuple[str, ...]:
    neat = [person + (text if not person else text[0].lower() + text[1:]) for person in _PEOPLE for text in _SMALL_TALK]
    every = list(dict.fromkeys(variant for text in neat for variant in (text, text.lower().rstrip("?.!") or text)))
    return tuple(every[number] for number in np.random.default_rng(3).permutation(len(every)))


def instructions(*, held_out: bool) -> tuple[str, ...]:
    """Sentences of a system message: those of training or, with `held_out`, those that it never uses."""
    return _INSTRUCTIONS[:_HELD_OUT_INSTRUCTIONS] if held_out else _INSTRUCTIONS[_HELD_OUT_INSTRUCTIONS:]
