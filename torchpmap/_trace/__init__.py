"""From a function to one graph, and from the graph to code for one device."""
