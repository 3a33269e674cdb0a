//! Messages that the router makes: to clients as a server would, to servers as a client would.

use bytes::{BufMut, BytesMut};

/// Starts a message; [`end_message`] fills in its length.
pub fn begin_message(output: &mut BytesMut, tag: u8) -> usize {
    let start = output.len();
    output.put_u8(tag);
    output.put_u32(0);
    start
}

/// Ends the message that starts at `start`.
pub fn end_message(output: &mut BytesMut, start: usize) {
    let length = u32::try_from(output.len() - start - 1).expect("messages are bounded far below 4 GiB");
    output[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
}

/// Appends whole messages to a buffer.
pub trait Reply {
    /// A message with `body`.
    fn message(&mut self, tag: u8, body: &[u8]);
    /// `ReadyForQuery` with `I`, `T` or `E`.
    fn ready_for_query(&mut self, status: u8);
    /// `CommandComplete`.
    fn command_complete(&mut self, tag: &str);
    /// `ParameterStatus`.
    fn parameter_status(&mut self, name: &str, value: &str);
    /// `RowDescription` of columns of type text.
    fn text_columns(&mut self, names: &[&str]);
    /// `DataRow` of text values.
    fn text_row(&mut self, values: &[Option<String>]);
    /// `NoticeResponse`.
    fn notice(&mut self, severity: &str, code: &str, text: &str);
    /// The same of severity WARNING.
    fn warning(&mut self, code: &str, text: &str) {
        self.notice("WARNING", code, text);
    }
    /// A simple `Query`.
    fn query(&mut self, sql: &str);
}

impl Reply for BytesMut {
    fn message(&mut self, tag: u8, body: &[u8]) {
        let start = begin_message(self, tag);
        self.put_slice(body);
        end_message(self, start);
    }

    fn ready_for_query(&mut self, status: u8) {
        self.message(b'Z', &[status]);
    }

    fn command_complete(&mut self, tag: &str) {
        let start = begin_message(self, b'C');
        self.put_slice(tag.as_bytes());
        self.put_u8(0);
        end_message(self, start);
    }

    fn parameter_status(&mut self, name: &str, value: &str) {
        let start = begin_message(self, b'S');
        for text in [name, value] {
            self.put_slice(text.as_bytes());
            self.put_u8(0);
        }
        end_message(self, start);
    }

    fn text_columns(&mut self, names: &[&str]) {
        const TEXT_OID: u32 = 25;
        let start = begin_message(self, b'T');
        self.put_u16(names.len() as u16);
        for name in names {
            self.put_slice(name.as_bytes());
            self.put_u8(0);
            self.put_u32(0);
            self.put_u16(0);
            self.put_u32(TEXT_OID);
            self.put_i16(-1);
            self.put_i32(-1);
            self.put_u16(0);
        }
        end_message(self, start);
    }

    fn text_row(&mut self, values: &[Option<String>]) {
        let start = begin_message(self, b'D');
        self.put_u16(values.len() as u16);
        for value in values {
            match value {
                Some(text) => {
                    self.put_i32(text.len() as i32);
                    self.put_slice(text.as_bytes());
                }
                None => self.put_i32(-1),
            }
        }
        end_message(self, start);
    }

    fn notice(&mut self, severity: &str, code: &str, text: &str) {
        let start = begin_message(self, b'N');
        for (kind, value) in [(b'S', severity), (b'V', severity), (b'C', code), (b'M', text)] {
            self.put_u8(kind);
            self.put_slice(value.as_bytes());
            self.put_u8(0);
        }
        self.put_u8(0);
        end_message(self, start);
    }

    fn query(&mut self, sql: &str) {
        let start = begin_message(self, b'Q');
        self.put_slice(sql.as_bytes());
        self.put_u8(0);
        end_message(self, start);
    }
}
