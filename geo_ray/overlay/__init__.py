"""How bridges carry a sum and its answer other than as a star: who sends which part to whom."""
