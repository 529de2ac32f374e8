output "ccn_id" {
  value = tencentcloud_ccn.this.id
}
