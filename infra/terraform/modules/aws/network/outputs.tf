output "vpc_id" {
  value = aws_vpc.this.id
}

output "cidr" {
  value = var.cidr
}

output "subnets" {
  description = "Private subnet by zone."
  value       = { for zone, subnet in aws_subnet.private : zone => subnet.id }
}

output "subnet_cidrs" {
  description = "Network of each private subnet, by zone."
  value       = local.private
}

output "public_subnet" {
  description = "Public subnet; null: none."
  value       = one(aws_subnet.public[*].id)
}

output "route_table_id" {
  description = "Route table of the private subnets."
  value       = aws_route_table.private.id
}
