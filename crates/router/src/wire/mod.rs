//! PostgreSQL's wire protocol, version 3: frames, and the few messages that the router reads or makes itself.
//!
//! Layouts are those of PostgreSQL's documentation, chapter "Message Formats". Everything else passes through as bytes.

mod buffered;
mod channel;
mod error_response;
mod frontend;
mod reply;
mod socket;

pub use buffered::buffered_bytes;
pub use channel::{Channel, ChannelError, Frame, InParts};
pub use error_response::{ErrorFields, SqlError, in_whole_message, sqlstate};
pub use frontend::{
    Bind, Close, CloseTarget, Describe, Execute, FrontendError, Parse, StartupPacket, rename_bind, sql_of_query,
};
pub use reply::{Reply, begin_message, end_message};
pub use socket::{Address, Listener, Socket};
