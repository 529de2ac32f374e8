"""What every strategy and every codec promises, as checks that anybody's class can be put to."""
