"""The tests mirror the packages; `support` holds what several of them need."""
