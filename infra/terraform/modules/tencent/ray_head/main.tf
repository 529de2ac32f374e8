# The machine of Ray's head, for stacks whose head is in this cloud. A new machine has the same
# address. Its state is on a separate encrypted disk that is deleted with the machine: resizing keeps
# it, another image does not.

locals {
  address = cidrhost(var.subnet.cidr, 10)
  port    = 6379
}

module "boot" {
  source = "../../boot"

  cloud = "tencent"
  join  = merge(var.join, { address = "${local.address}:${local.port}" })
  labels = {
    "geo-ray/role"       = "head"
    "ray.io/market-type" = "on-demand"
    "ray.io/node-group"  = var.instance_type
  }
  serves       = var.serves
  state_device = "/dev/vdb"
}

resource "tencentcloud_instance" "this" {
  instance_name               = "${var.name}-head"
  instance_type               = var.instance_type
  image_id                    = var.image_id
  availability_zone           = var.subnet.zone
  vpc_id                      = var.vpc_id
  subnet_id                   = var.subnet.id
  private_ip                  = local.address
  orderly_security_groups     = var.security_group_ids
  cam_role_name               = var.role
  allocate_public_ip          = false
  instance_charge_type        = "POSTPAID_BY_HOUR"
  system_disk_type            = "CLOUD_BSSD"
  system_disk_size            = var.disk_gb
  system_disk_encrypt         = true
  disable_api_termination     = var.protected
  user_data_raw               = module.boot.script
  user_data_replace_on_change = true
  tags                        = var.tags

  data_disks {
    data_disk_type       = "CLOUD_BSSD"
    data_disk_size       = var.state_gb
    encrypt              = true
    delete_with_instance = true
  }
}
