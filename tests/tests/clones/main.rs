//! A clone is the same as its source, and an ordinary server, however it was made and whatever happened meanwhile.

mod controls;
mod copies;
mod deaths;
mod frozen;
mod lazy;
mod reflink;
mod warmth;
