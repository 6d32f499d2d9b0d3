"""The draft worker: it proposes tokens and decides nothing."""
