locals {
  tags = { "geo-ray:stack" = var.name }
}

provider "aws" {
  alias  = "eu"
  region = "eu-central-1"

  default_tags {
    tags = local.tags
  }
}

provider "tencentcloud" {
  alias  = "sg"
  region = "ap-singapore"
}

provider "tencentcloud" {
  alias  = "jp"
  region = "ap-tokyo"
}
