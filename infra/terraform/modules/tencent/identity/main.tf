# What machines of one kind may do: read their secrets, use their own region's data and the runs. The
# head may rent machines besides, if an autoscaler runs there.

data "tencentcloud_user_info" "here" {}

locals {
  owner = data.tencentcloud_user_info.here.owner_uin
  app   = data.tencentcloud_user_info.here.app_id
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
  rents = !var.rents ? [] : [
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
}

resource "tencentcloud_cam_role" "this" {
  name        = "${var.name}-${var.kind}"
  description = "geo_ray: ${var.kind} of ${var.cluster}"
  tags        = var.tags
  document = jsonencode({
    version = "2.0"
    statement = [{
      effect    = "allow"
      action    = ["name/sts:AssumeRole"]
      principal = { service = ["cvm.qcloud.com"] }
    }]
  })
}

resource "tencentcloud_cam_policy" "this" {
  name        = "${var.name}-${var.kind}"
  description = "geo_ray: ${var.kind} of ${var.cluster}"
  document = jsonencode({
    version = "2.0"
    statement = concat(
      local.secrets,
      local.buckets,
      [for each in local.rents : { for key, value in each : key => value if value != null }],
    )
  })
}

resource "tencentcloud_cam_role_policy_attachment" "this" {
  role_id   = tencentcloud_cam_role.this.id
  policy_id = tencentcloud_cam_policy.this.id
}
