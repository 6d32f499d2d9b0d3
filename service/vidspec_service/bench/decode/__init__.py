"""`bench decode`: our video decoding compared with other libraries, on the same frames of the same clips."""
