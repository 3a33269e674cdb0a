//! SCRAM-SHA-256 on both sides of the router.
