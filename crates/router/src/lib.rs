//! One-copy serializability over a PostgreSQL leader and its followers.
