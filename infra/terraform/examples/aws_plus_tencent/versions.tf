terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 6"
    }

    tencentcloud = {
      source  = "tencentcloudstack/tencentcloud"
      version = "~> 1.83.25"
    }
  }
}
