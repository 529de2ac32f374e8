# Permissions of one kind of machine: read its secrets, use its region's data; on the head, rent
# machines if an autoscaler runs there. Roles give no access to the records of cluster and runs: a
# role opens no bucket for the S3 protocol, and the keys for it are a secret of the head.

locals {
  secrets = [for secret in var.secrets : {
    effect   = "allow"
    action   = ["ssm:ListSecretVersionIds", "ssm:GetSecretValue"]
    resource = ["qcs::ssm:${secret.region}:uin/${local.owner}:secret/creatorUin/*/${secret.name}"]
  }]
  buckets = [for bucket in var.buckets : {
    effect = "allow"
    action = [
      "cos:HeadBucket", "cos:GetBucket", "cos:HeadObject", "cos:GetObject", "cos:PutObject", "cos:DeleteObject",
      "cos:InitiateMultipartUpload", "cos:UploadPart", "cos:CompleteMultipartUpload", "cos:AbortMultipartUpload",
    ]
    resource = [
      "qcs::cos:${bucket.region}:uid/${local.app}:${bucket.name}",
      "qcs::cos:${bucket.region}:uid/${local.app}:${bucket.name}/*",
    ]
  }]
  # Machines can be rented and ended only with the cluster's tag, which the head does not have.
  rights = [
    {
      effect    = "allow"
      action    = ["cvm:DescribeInstances", "cvm:DescribeZoneInstanceConfigInfos"]
      resource  = ["*"]
      condition = null
    },
    {
      effect    = "allow"
      action    = ["cvm:RunInstances", "tag:TagResources"]
      resource  = ["*"]
      condition = { "for_any_value:string_equal" = { "qcs:request_tag" = ["geo-ray:cluster&${var.cluster}"] } }
    },
    {
      effect    = "allow"
      action    = ["cvm:TerminateInstances"]
      resource  = ["*"]
      condition = { "for_any_value:string_equal" = { "qcs:resource_tag" = ["geo-ray:cluster&${var.cluster}"] } }
    },
    {
      effect    = "allow"
      action    = ["cam:PassRole"]
      resource  = [for name in var.passed_roles : "qcs::cam::uin/${local.owner}:roleName/${name}"]
      condition = null
    },
  ]
  # A tuple, because members of a list must have the same type.
  rents = [for each in local.rights : { for key, value in each : key => value if value != null } if var.rents]
  policy = {
    version   = "2.0"
    statement = concat(local.secrets, local.buckets, local.rents)
  }
}
