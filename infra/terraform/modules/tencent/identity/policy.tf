# What machines of one kind may do: read their secrets, use their own region's data. The head may rent
# machines besides, if an autoscaler runs there. Nothing here reaches what is written down of cluster
# and runs: a role opens no bucket for the S3 protocol, and the keys that do are the head's secret.

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
  # A machine can only be rented with the cluster's tag, and only such a one be ended: never the head.
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
  # A tuple, whose members may be of different types; a list may not.
  rents = [for each in local.rights : { for key, value in each : key => value if value != null } if var.rents]
  policy = {
    version   = "2.0"
    statement = concat(local.secrets, local.buckets, local.rents)
  }
}
