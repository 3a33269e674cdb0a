//! What the router must know of a statement before it runs.
