"""What runs a step on every rank: the model runner, commands to the ranks, updates of the weights."""
