"""Published training runs, predicted again: how far the cost model is from what others measured."""
