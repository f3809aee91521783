"""Training drafters on one's own traffic: logs → answers of the target → hidden states on the fly → a head that pays when served."""
