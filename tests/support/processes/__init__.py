"""Other processes and threads of tests: ranks, servers, commands, interrupts."""
