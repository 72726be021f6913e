"""One planned run on this rank, whatever program trains: what it asks of that program, how it runs, what it says."""
