# The role of one kind of machine; policy.tf has its permissions.

data "tencentcloud_user_info" "here" {}

locals {
  owner = data.tencentcloud_user_info.here.owner_uin
  app   = data.tencentcloud_user_info.here.app_id
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
  document    = jsonencode(local.policy)
}

resource "tencentcloud_cam_role_policy_attachment" "this" {
  role_id   = tencentcloud_cam_role.this.id
  policy_id = tencentcloud_cam_policy.this.id
}
