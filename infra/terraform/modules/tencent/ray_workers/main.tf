# Machines that Terraform controls. They are not in a scaling group, since a group's disks cannot be
# encrypted; the next `terraform apply` replaces a preempted machine.

locals {
  zones = sort(keys(var.subnets))
  machines = merge([
    for name, pool in var.pools : { for number in range(pool.count) : "${name}/${number}" => merge(pool, { pool = name, zone = local.zones[number % length(local.zones)] }) }
  ]...)
}

module "boot" {
  source   = "../../boot"
  for_each = var.pools

  cloud = "tencent"
  join  = var.join
  labels = {
    "geo-ray/role"               = each.value.role
    "ray.io/availability-region" = var.region
    "ray.io/market-type"         = replace(each.value.market, "_", "-")
    "ray.io/node-group"          = each.value.type
  }
}

resource "tencentcloud_instance" "this" {
  for_each = local.machines

  instance_name           = "${var.name}-${replace(each.key, "/", "-")}"
  instance_type           = each.value.type
  image_id                = var.image_id
  availability_zone       = each.value.zone
  vpc_id                  = var.vpc_id
  subnet_id               = var.subnets[each.value.zone]
  orderly_security_groups = var.security_group_ids
  cam_role_name           = var.role
  allocate_public_ip      = false
  system_disk_type        = "CLOUD_BSSD"
  system_disk_size        = var.disk_gb
  system_disk_encrypt     = true
  instance_charge_type    = each.value.market == "spot" ? "SPOTPAID" : "POSTPAID_BY_HOUR"
  spot_instance_type      = each.value.market == "spot" ? "ONE-TIME" : null
  spot_max_price          = each.value.market == "spot" ? var.spot_max_prices[each.value.type] : null
  user_data_raw           = module.boot[each.value.pool].script
  tags                    = merge(var.tags, { "geo-ray:label:geo-ray/role" = each.value.role })
}
