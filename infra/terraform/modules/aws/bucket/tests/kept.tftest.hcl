# A bucket is encrypted, versioned and private. The provider is mocked.
mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = {
      json = "{}"
    }
  }

  mock_resource "aws_kms_key" {
    defaults = {
      arn = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    }
  }
}

variables {
  name    = "trial"
  purpose = "runs"
}

run "encrypted_versioned_and_closed" {
  command = apply

  assert {
    condition     = one([for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : one(rule.apply_server_side_encryption_by_default).kms_master_key_id]) == aws_kms_key.this.arn
    error_message = "The bucket has no key of its own."
  }

  assert {
    condition     = aws_kms_key.this.enable_key_rotation
    error_message = "The key stays the same for ever."
  }

  assert {
    condition     = one(aws_s3_bucket_versioning.this.versioning_configuration).status == "Enabled"
    error_message = "What is overwritten is lost."
  }

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this.block_public_acls,
      aws_s3_bucket_public_access_block.this.block_public_policy,
      aws_s3_bucket_public_access_block.this.ignore_public_acls,
      aws_s3_bucket_public_access_block.this.restrict_public_buckets,
    ])
    error_message = "The bucket can be opened to the public."
  }

  assert {
    condition     = one(one(aws_s3_bucket_lifecycle_configuration.this.rule).noncurrent_version_expiration).noncurrent_days == 30
    error_message = "Old versions are kept for another time."
  }

  assert {
    condition     = aws_s3_bucket.this.force_destroy == false
    error_message = "What it holds would go with it."
  }
}

run "for_data_or_for_runs" {
  command = plan

  variables {
    purpose = "other"
  }

  expect_failures = [var.purpose]
}
