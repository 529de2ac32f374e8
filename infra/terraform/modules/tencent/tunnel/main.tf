# One end of WireGuard tunnels to other clouds: a small machine with a public address. Only WireGuard's
# port is open, and only to the other ends.

resource "tencentcloud_eip" "this" {
  name                       = "${var.name}-tunnel"
  internet_charge_type       = "TRAFFIC_POSTPAID_BY_HOUR"
  internet_max_bandwidth_out = var.mbps
  tags                       = var.tags
}

# Store the private key of this end in it.
resource "tencentcloud_ssm_secret" "key" {
  secret_name             = "geo-ray-${var.name}-tunnel"
  description             = "Private key of this end"
  recovery_window_in_days = 0
  tags                    = var.tags
}

module "identity" {
  source = "../identity"

  name    = var.name
  kind    = "tunnel"
  cluster = var.name
  secrets = [{ region = var.at, name = tencentcloud_ssm_secret.key.secret_name }]
  tags    = var.tags
}

module "script" {
  source = "../../tunnel"

  cloud  = "tencent"
  secret = { store = "tencent-ssm", region = var.at, name = tencentcloud_ssm_secret.key.secret_name }
  python = var.python
  peers  = var.peers
}

resource "tencentcloud_security_group" "this" {
  name        = "${var.name}-tunnel"
  description = "The end of tunnels to other clouds"
  tags        = var.tags
}

resource "tencentcloud_security_group_rule_set" "this" {
  security_group_id = tencentcloud_security_group.this.id

  dynamic "ingress" {
    for_each = var.peers
    content {
      action      = "ACCEPT"
      cidr_block  = "${ingress.value.address}/32"
      protocol    = "UDP"
      port        = "51820"
      description = "WireGuard: the other end"
    }
  }

  ingress {
    action      = "ACCEPT"
    cidr_block  = var.cidr
    protocol    = "ALL"
    port        = "ALL"
    description = "From this network into the tunnels"
  }

  dynamic "egress" {
    for_each = var.peers
    content {
      action      = "ACCEPT"
      cidr_block  = "${egress.value.address}/32"
      protocol    = "UDP"
      port        = "51820"
      description = "WireGuard: the other end"
    }
  }

  egress {
    action      = "ACCEPT"
    cidr_block  = var.cidr
    protocol    = "ALL"
    port        = "ALL"
    description = "From the tunnels"
  }

  egress {
    action      = "ACCEPT"
    cidr_block  = "0.0.0.0/0"
    protocol    = "TCP"
    port        = "443"
    description = "HTTPS: the cloud's APIs, for the key"
  }
}

resource "tencentcloud_instance" "this" {
  instance_name               = "${var.name}-tunnel"
  instance_type               = var.instance_type
  image_id                    = var.image_id
  availability_zone           = var.subnet.zone
  vpc_id                      = var.vpc_id
  subnet_id                   = var.subnet.id
  orderly_security_groups     = [tencentcloud_security_group.this.id]
  cam_role_name               = module.identity.role
  allocate_public_ip          = false
  instance_charge_type        = "POSTPAID_BY_HOUR"
  system_disk_type            = "CLOUD_BSSD"
  system_disk_size            = 50
  system_disk_encrypt         = true
  user_data_raw               = module.script.script
  user_data_replace_on_change = true
  tags                        = var.tags
}

resource "tencentcloud_eip_association" "this" {
  eip_id      = tencentcloud_eip.this.id
  instance_id = tencentcloud_instance.this.id
}

resource "tencentcloud_route_table_entry" "peers" {
  count = length(var.peers)

  route_table_id         = var.route_table_id
  destination_cidr_block = var.peers[count.index].cidr
  next_type              = "NORMAL_CVM"
  next_hub               = tencentcloud_instance.this.private_ip
  description            = "Another cloud"
}
