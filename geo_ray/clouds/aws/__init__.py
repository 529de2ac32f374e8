"""Amazon Web Services: prices, through boto3."""
