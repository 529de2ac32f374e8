# A bucket for data or runs: encrypted, versioned, private. Its name must end in the account's number.

data "tencentcloud_user_info" "here" {}

resource "tencentcloud_cos_bucket" "this" {
  bucket               = "${var.name}-${var.purpose}-${data.tencentcloud_user_info.here.app_id}"
  acl                  = "private"
  encryption_algorithm = var.kms_key_id == null ? "AES256" : "KMS"
  kms_id               = var.kms_key_id
  versioning_enable    = true
  force_clean          = var.force_destroy
  tags                 = var.tags

  lifecycle_rules {
    id            = "old-versions"
    filter_prefix = ""

    non_current_expiration {
      non_current_days = var.old_versions_days
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
}
