"""`bench decode`: our decoding next to other libraries, on the same frames of the same clips."""
