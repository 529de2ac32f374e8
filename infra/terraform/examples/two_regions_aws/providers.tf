# Every region has its own provider. Default tags apply to all resources except machines of groups.

locals {
  tags = { "geo-ray:stack" = var.name }
}

provider "aws" {
  alias  = "us"
  region = "us-east-1"

  default_tags {
    tags = local.tags
  }
}

provider "aws" {
  alias  = "eu"
  region = "eu-central-1"

  default_tags {
    tags = local.tags
  }
}
