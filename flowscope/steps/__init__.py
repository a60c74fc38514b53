"""When a training step begins and ends, what is read in it and when, and which loss belongs to it."""
