"""Whether what an answer must look like can be followed, known before its request costs anything."""
