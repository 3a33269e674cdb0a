//! The client's side of what is agreed on before data flows.

use std::io::{self, Write};
use std::sync::Arc;

use super::url::Url;
use crate::format::header::check_size;
use crate::nbd::protocol::handshake::{
    AnswerHeader, ContextRequest, FIXED_NEWSTYLE, Information, InformationRequest, NO_ZEROES, OPTION_BYTES_MAX, answer,
    option, option_message, parse_context, parse_greeting,
};
use crate::nbd::protocol::{BASE_ALLOCATION, PAYLOAD_BYTES_MAX, Violation, transmission_flag};
use crate::nbd::stream::Stream;
use crate::nbd::tls::Session;

/// A server that answers an option with more than so many messages does not mean well.
const ANSWERS_MAX: usize = 64;

/// A server that does not say how requests must be cut understands these (the document's "Size constraints").
const DEFAULT_BLOCK_BYTES: u32 = 512;

/// What an export is, by its server's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) size_bytes: u64,
    pub(super) is_read_only: bool,
    pub(super) can_multi_connect: bool,
    pub(super) description: Option<String>,
    pub(super) is_structured: bool,
    /// The number of the context in which states of extents come, when the server tells them.
    pub(super) allocation_context: Option<u32>,
    /// Requests are multiples of this.
    pub(super) minimum_bytes: u32,
    /// The longest read.
    pub(super) maximum_bytes: u32,
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The server does not want it, and says why.
    Refused(String),
    /// Anything else.
    Lost(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Lost(error)
    }
}

impl From<Violation> for Refusal {
    fn from(violation: Violation) -> Refusal {
        Refusal::Lost(violation.into())
    }
}

/// Negotiates up to where requests can be sent.
pub(super) fn open(
    mut stream: Stream,
    url: &Url,
    tls: Option<&Arc<rustls::ClientConfig>>,
) -> Result<(Stream, Agreed), Refusal> {
    let flags = parse_greeting(&stream.array()?)?;
    let flags = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    stream.outgoing.write_all(&flags.to_be_bytes())?;
    if let Some(config) = tls {
        // Before anything else: nobody in between learns which export is asked for, or can change what is agreed on.
        ask(&mut stream, option::STARTTLS, &[], |_, _| Ok(()))?;
        stream = stream.encrypt(|socket| Session::call(Arc::clone(config), &url.server_name, socket))?;
    }
    let is_structured = supports(ask(&mut stream, option::STRUCTURED_REPLY, &[], |_, _| Ok(())))?;
    let mut allocation_context = None;
    if is_structured {
        let request = ContextRequest { name: url.export.clone(), queries: vec![BASE_ALLOCATION.to_owned()] };
        let outcome = ask(&mut stream, option::SET_META_CONTEXT, &request.encode(), |kind, data| {
            if kind == answer::META_CONTEXT {
                let (number, name) = parse_context(data)?;
                allocation_context = (name == BASE_ALLOCATION).then_some(number).or(allocation_context);
            }
            Ok(())
        });
        if !supports(outcome)? {
            allocation_context = None;
        }
    }
    let mut agreed = go(&mut stream, url)?;
    agreed.is_structured = is_structured;
    agreed.allocation_context = allocation_context;
    Ok((stream, agreed))
}

fn go(stream: &mut Stream, url: &Url) -> Result<Agreed, Refusal> {
    let wanted = vec![Information::BLOCK_SIZE, Information::DESCRIPTION];
    let request = InformationRequest { name: url.export.clone(), wanted };
    let (mut export, mut blocks, mut description) = (None, None, None);
    ask(stream, option::GO, &request.encode(), |kind, data| {
        if kind == answer::INFO {
            match Information::parse(data)? {
                Information::Export { size_bytes, flags } => export = Some((size_bytes, flags)),
                Information::BlockSize { minimum_bytes, maximum_bytes, .. } => {
                    blocks = Some((minimum_bytes, maximum_bytes));
                }
                Information::Description(text) => description = Some(text),
                Information::Other(_) => {}
            }
        }
        Ok(())
    })?;
    let (size_bytes, flags) = export.ok_or_else(|| Violation::new("an export without a size"))?;
    check_size(size_bytes).map_err(Refusal::Refused)?;
    let (minimum_bytes, maximum_bytes) = blocks.unwrap_or((DEFAULT_BLOCK_BYTES, PAYLOAD_BYTES_MAX));
    if !minimum_bytes.is_power_of_two() || minimum_bytes > 1 << 16 || maximum_bytes < minimum_bytes {
        return Err(Violation::new(format!("requests of {minimum_bytes} to {maximum_bytes} bytes")).into());
    }
    Ok(Agreed {
        size_bytes,
        is_read_only: flags & transmission_flag::READ_ONLY != 0,
        can_multi_connect: flags & transmission_flag::CAN_MULTI_CONN != 0,
        description,
        is_structured: false,
        allocation_context: None,
        minimum_bytes,
        maximum_bytes: maximum_bytes.min(PAYLOAD_BYTES_MAX),
    })
}

/// Whether the server knows an option at all; a refusal of another kind is one.
fn supports(outcome: Result<(), Refusal>) -> Result<bool, Refusal> {
    match outcome {
        Ok(()) => Ok(true),
        Err(Refusal::Refused(_)) => Ok(false),
        Err(lost) => Err(lost),
    }
}

/// Sends an option and gives its answers, but for the last, to `each`.
fn ask(
    stream: &mut Stream,
    option: u32,
    data: &[u8],
    mut each: impl FnMut(u32, &[u8]) -> Result<(), Violation>,
) -> Result<(), Refusal> {
    stream.outgoing.write_all(&option_message(option, data))?;
    for _ in 0..ANSWERS_MAX {
        let header = AnswerHeader::parse(&stream.array()?)?;
        if header.option != option {
            return Err(Violation::new("an answer to another option").into());
        }
        let data = stream.data(header.length, OPTION_BYTES_MAX)?;
        match header.kind {
            answer::ACK => return Ok(()),
            kind if kind & answer::ERROR != 0 => {
                let text = String::from_utf8_lossy(&data);
                let reason = if text.is_empty() { reason(kind) } else { text.trim_end().to_owned() };
                return Err(Refusal::Refused(reason));
            }
            kind => each(kind, &data)?,
        }
    }
    Err(Violation::new("answers without end").into())
}

fn reason(kind: u32) -> String {
    match kind {
        answer::UNKNOWN => "there is no such export".into(),
        answer::TLS_REQUIRED => "the server wants encryption: use nbds:// and certificates".into(),
        answer::UNSUPPORTED => "the server does not know what it was asked for".into(),
        answer::SHUTDOWN => "the server is about to stop".into(),
        _ => format!("the server refused (error {:#x})", kind),
    }
}
