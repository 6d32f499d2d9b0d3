"""Requests and answers as they go over the wire, in both dialects: ours and OpenAI's."""
