"""Messages between the processes of one machine: channels, typed messages, arrays in shared memory."""
