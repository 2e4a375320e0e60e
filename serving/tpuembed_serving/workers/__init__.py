"""Serves from several processes: a supervisor, its workers, their messages and sockets, and the stages of a stop."""
