"""Several processes that serve as one: a supervisor, its workers, their messages and sockets, and the stages of a stop."""
