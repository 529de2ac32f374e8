output "vpc_id" {
  value = tencentcloud_vpc.this.id
}

output "cidr" {
  value = var.cidr
}

output "subnets" {
  description = "Private subnet by zone."
  value       = { for zone, subnet in tencentcloud_subnet.private : zone => subnet.id }
}

output "subnet_cidrs" {
  description = "Network of each private subnet, by zone."
  value       = local.private
}

output "public_subnet" {
  value = { id = tencentcloud_subnet.public.id, cidr = cidrsubnet(var.cidr, 8, 0), zone = sort(var.zones)[0] }
}

output "route_table_id" {
  description = "Route table of the private subnets."
  value       = tencentcloud_route_table.private.id
}
