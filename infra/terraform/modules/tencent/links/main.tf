# Private links between Tencent's regions: one Cloud Connect Network connects all networks.

locals {
  names = sort(keys(var.networks))
  pairs = {
    for pair in setproduct(local.names, local.names) : "${pair[0]} ${pair[1]}" => pair if pair[0] < pair[1]
  }
}

resource "tencentcloud_ccn" "this" {
  name                 = var.name
  description          = "geo_ray: regions of ${var.name}"
  qos                  = "AU"
  charge_type          = "POSTPAID"
  bandwidth_limit_type = "INTER_REGION_LIMIT"
  tags                 = var.tags
}

resource "tencentcloud_ccn_attachment_v2" "this" {
  for_each = var.networks

  ccn_id          = tencentcloud_ccn.this.id
  instance_type   = "VPC"
  instance_id     = each.value.vpc_id
  instance_region = each.value.at
  description     = each.key
}

resource "tencentcloud_ccn_bandwidth_limit" "this" {
  for_each = local.pairs

  ccn_id          = tencentcloud_ccn.this.id
  region          = var.networks[each.value[0]].at
  dst_region      = var.networks[each.value[1]].at
  bandwidth_limit = var.mbps
  depends_on      = [tencentcloud_ccn_attachment_v2.this]
}
