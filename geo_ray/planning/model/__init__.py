"""What a choice of machines and exchanges takes in time and money, term by term."""
