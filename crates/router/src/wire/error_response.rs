//! Errors as PostgreSQL sends them.

use bytes::{BufMut, Bytes, BytesMut};

use super::channel::Frame;
use super::reply::{begin_message, end_message};

/// The SQLSTATE codes that the router itself gives; the meanings are PostgreSQL's, appendix "Error Codes".
pub mod sqlstate {
    /// warning
    pub const WARNING: &str = "01000";
    /// protocol_violation
    pub const PROTOCOL_VIOLATION: &str = "08P01";
    /// connection_failure
    pub const CONNECTION_FAILURE: &str = "08006";
    /// transaction_resolution_unknown
    pub const TRANSACTION_RESOLUTION_UNKNOWN: &str = "08007";
    /// feature_not_supported
    pub const FEATURE_NOT_SUPPORTED: &str = "0A000";
    /// character_not_in_repertoire
    pub const CHARACTER_NOT_IN_REPERTOIRE: &str = "22021";
    /// invalid_parameter_value
    pub const INVALID_PARAMETER_VALUE: &str = "22023";
    /// name_too_long
    pub const NAME_TOO_LONG: &str = "42622";
    /// active_sql_transaction
    pub const ACTIVE_SQL_TRANSACTION: &str = "25001";
    /// read_only_sql_transaction
    pub const READ_ONLY_SQL_TRANSACTION: &str = "25006";
    /// no_active_sql_transaction
    pub const NO_ACTIVE_SQL_TRANSACTION: &str = "25P01";
    /// idle_in_transaction_session_timeout
    pub const IDLE_IN_TRANSACTION_TIMEOUT: &str = "25P03";
    /// in_failed_sql_transaction
    pub const IN_FAILED_SQL_TRANSACTION: &str = "25P02";
    /// invalid_sql_statement_name
    pub const INVALID_SQL_STATEMENT_NAME: &str = "26000";
    /// invalid_authorization_specification
    pub const INVALID_AUTHORIZATION: &str = "28000";
    /// invalid_password
    pub const INVALID_PASSWORD: &str = "28P01";
    /// What the codes of class 40, transaction_rollback, begin with.
    pub const TRANSACTION_ROLLBACK_CLASS: &str = "40";
    /// serialization_failure
    pub const SERIALIZATION_FAILURE: &str = "40001";
    /// invalid_cursor_name
    pub const INVALID_CURSOR_NAME: &str = "34000";
    /// duplicate_prepared_statement
    pub const DUPLICATE_PREPARED_STATEMENT: &str = "42P05";
    /// lock_not_available
    pub const LOCK_NOT_AVAILABLE: &str = "55P03";
    /// cant_change_runtime_param
    pub const CANNOT_CHANGE_RUNTIME_PARAM: &str = "55P02";
    /// insufficient_privilege
    pub const INSUFFICIENT_PRIVILEGE: &str = "42501";
    /// syntax_error
    pub const SYNTAX_ERROR: &str = "42601";
    /// too_many_connections
    pub const TOO_MANY_CONNECTIONS: &str = "53300";
    /// program_limit_exceeded
    pub const PROGRAM_LIMIT_EXCEEDED: &str = "54000";
    /// query_canceled
    pub const QUERY_CANCELED: &str = "57014";
    /// admin_shutdown
    pub const ADMIN_SHUTDOWN: &str = "57P01";
    /// cannot_connect_now
    pub const CANNOT_CONNECT_NOW: &str = "57P03";
    /// idle_session_timeout
    pub const IDLE_SESSION_TIMEOUT: &str = "57P05";
    /// object_not_in_prerequisite_state
    pub const OBJECT_NOT_IN_PREREQUISITE_STATE: &str = "55000";
    /// invalid_catalog_name
    pub const INVALID_CATALOG_NAME: &str = "3D000";
}

/// An error that the router gives to a client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{severity}: {message} ({code})")]
pub struct SqlError {
    /// `ERROR`, or `FATAL` when the connection ends with it.
    pub severity: &'static str,
    /// SQLSTATE.
    pub code: String,
    /// What failed, on what.
    pub message: String,
    /// The rest, by the fields' letters: why, what to do, the constraint's name, the context and so on.
    pub others: Vec<(u8, Bytes)>,
}

impl SqlError {
    /// An error after which the session goes on.
    pub fn error(code: &str, message: impl Into<String>) -> SqlError {
        SqlError { severity: "ERROR", code: code.to_owned(), message: message.into(), others: Vec::new() }
    }

    /// An error with which the session ends.
    pub fn fatal(code: &str, message: impl Into<String>) -> SqlError {
        SqlError { severity: "FATAL", ..SqlError::error(code, message) }
    }

    /// Adds the reason.
    pub fn detail(self, detail: impl Into<String>) -> SqlError {
        self.with(b'D', detail.into())
    }

    /// Adds the remedy.
    pub fn hint(self, hint: impl Into<String>) -> SqlError {
        self.with(b'H', hint.into())
    }

    /// Whether it says what to do.
    pub fn has_hint(&self) -> bool {
        self.others.iter().any(|(kind, _)| *kind == b'H')
    }

    fn with(mut self, kind: u8, text: String) -> SqlError {
        self.others.retain(|(known, _)| *known != kind);
        self.others.push((kind, text.into()));
        self
    }

    /// Appends the `ErrorResponse` message.
    pub fn encode(&self, output: &mut BytesMut) {
        let start = super::begin_message(output, b'E');
        let mut field = |kind: u8, value: &[u8]| {
            output.put_u8(kind);
            output.put_slice(value);
            output.put_u8(0);
        };
        field(b'S', self.severity.as_bytes());
        field(b'V', self.severity.as_bytes());
        field(b'C', self.code.as_bytes());
        field(b'M', self.message.as_bytes());
        for (kind, value) in &self.others {
            field(*kind, value);
        }
        output.put_u8(0);
        super::end_message(output, start);
    }
}

/// What a server's `ErrorResponse` says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ErrorFields {
    /// Not localised: `ERROR`, `FATAL` or `PANIC`.
    pub severity: String,
    /// SQLSTATE.
    pub code: String,
    /// The message.
    pub message: String,
    /// The rest, by the fields' letters: detail, hint, the constraint's name and so on.
    pub others: Box<[(u8, Bytes)]>,
}

/// A server's words of a statement of the router's own: where in that the error is says nothing to a client.
impl From<ErrorFields> for SqlError {
    fn from(fields: ErrorFields) -> SqlError {
        let others = fields.others.into_iter().filter(|(kind, _)| *kind != b'P').collect();
        SqlError { others, ..SqlError::error(&fields.code, fields.message) }
    }
}

impl ErrorFields {
    /// Reads the fields of an `ErrorResponse` body; what is missing stays empty.
    pub fn parse(body: &Bytes) -> ErrorFields {
        let (mut fields, mut others) = (ErrorFields::default(), Vec::new());
        let mut rest: &[u8] = body;
        while let Some((&kind, after)) = rest.split_first() {
            if kind == 0 {
                break;
            }
            let Some(end) = after.iter().position(|&byte| byte == 0) else { break };
            let value = &after[..end];
            let text = || String::from_utf8_lossy(value).into_owned();
            match kind {
                b'S' => {}
                b'V' => fields.severity = text(),
                b'C' => fields.code = text(),
                b'M' => fields.message = text(),
                _ => others.push((kind, body.slice_ref(value))),
            }
            rest = &after[end + 1..];
        }
        ErrorFields { others: others.into(), ..fields }
    }
}

/// An error or notice of a statement `behind` so many characters of the client's message: its position counts from the
/// message's beginning.
pub fn in_whole_message(frame: Frame, behind: usize) -> Frame {
    let fields = frame.bytes.get(5..).unwrap_or_default();
    if behind == 0 || frame.rest > 0 || !fields.split(|byte| *byte == 0).any(|field| field.first() == Some(&b'P')) {
        return frame;
    }
    let mut output = BytesMut::with_capacity(frame.bytes.len() + 10);
    let start = begin_message(&mut output, frame.tag);
    // The last one is the end's zero.
    for field in fields.split_inclusive(|byte| *byte == 0) {
        let position = field.strip_prefix(b"P").and_then(|text| text.strip_suffix(b"\0"));
        match position.and_then(|text| std::str::from_utf8(text).ok()?.parse::<usize>().ok()) {
            Some(position) => output.put_slice(format!("P{}\0", position.saturating_add(behind)).as_bytes()),
            None => output.put_slice(field),
        }
    }
    end_message(&mut output, start);
    Frame::whole(frame.tag, output.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_read_again() {
        let mut output = BytesMut::new();
        SqlError::fatal(sqlstate::INVALID_PASSWORD, "no").hint("yes").encode(&mut output);
        assert_eq!(output[0], b'E');
        assert_eq!(u32::from_be_bytes([output[1], output[2], output[3], output[4]]) as usize, output.len() - 1);
        let fields = ErrorFields::parse(&output.freeze().slice(5..));
        assert_eq!((fields.severity.as_str(), fields.code.as_str(), fields.message.as_str()), ("FATAL", "28P01", "no"));
    }

    #[test]
    fn what_a_server_says_beside_its_message_goes_to_the_client() {
        let said: [(u8, &str); 8] = [
            (b'S', "FEHLER"),
            (b'V', "ERROR"),
            (b'C', "23505"),
            (b'M', "duplicate key"),
            (b'D', "Key (i)=(1) already exists."),
            (b'P', "7"),
            (b'n', "du_u"),
            (b'R', "_bt_check_unique"),
        ];
        let mut body: Vec<u8> =
            said.iter().flat_map(|(kind, text)| [&[*kind], text.as_bytes(), &[0]].concat()).collect();
        body.push(0);
        let mut output = BytesMut::new();
        SqlError::from(ErrorFields::parse(&body.into())).encode(&mut output);
        let again = ErrorFields::parse(&output.freeze().slice(5..));
        assert_eq!((&*again.severity, &*again.code, &*again.message), ("ERROR", "23505", "duplicate key"));
        let others = [(b'D', "Key (i)=(1) already exists."), (b'n', "du_u"), (b'R', "_bt_check_unique")];
        assert_eq!(
            *again.others,
            others.map(|(kind, text)| (kind, Bytes::from(text))),
            "but where in the router's words"
        );
    }

    #[test]
    fn a_position_counts_from_the_beginning_of_the_message() {
        let frame = |body: &[u8]| {
            let mut output = BytesMut::new();
            let start = begin_message(&mut output, b'E');
            output.put_slice(body);
            end_message(&mut output, start);
            Frame::whole(b'E', output.freeze())
        };
        for (said, told) in [
            (&b"SERROR\0MPoint\0P8\0p3\0\0"[..], &b"SERROR\0MPoint\0P108\0p3\0\0"[..]),
            (b"SERROR\0Pxy\0\0", b"SERROR\0Pxy\0\0"),
            (b"SERROR\0M\0\0", b"SERROR\0M\0\0"),
            (b"P18446744073709551615\0", b"P18446744073709551615\0"),
            (b"P", b"P"),
            (b"", b""),
        ] {
            assert_eq!(in_whole_message(frame(said), 100).bytes, frame(told).bytes);
            assert_eq!(in_whole_message(frame(said), 0).bytes, frame(said).bytes);
        }
    }

    #[test]
    fn a_cut_off_error_does_not_panic() {
        assert_eq!(ErrorFields::parse(&Bytes::from_static(b"C400")), ErrorFields::default());
    }
}
