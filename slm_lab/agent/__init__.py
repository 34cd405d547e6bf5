"""The agent room: algorithms, memories, nets, policies, and the agent that holds one of each."""
