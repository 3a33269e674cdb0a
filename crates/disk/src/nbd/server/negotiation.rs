//! What a client and the server agree on before data flows.
//!
//! ```text
//!   greeting -> [STARTTLS] -> options in any order -> GO | EXPORT_NAME -> transmission
//!                                                  -> ABORT, or the end
//! ```

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use super::Shared;
use super::exports::{Content, Export, ExportInformation};
use crate::nbd::protocol::handshake::{
    ContextRequest, FIXED_NEWSTYLE, Information, InformationRequest, NO_ZEROES, OPTION_BYTES_MAX, OptionHeader,
    ZEROES_BYTES, answer, answer_message, context_data, greeting, option, parse_name,
};
use crate::nbd::protocol::{BASE_ALLOCATION, PAYLOAD_BYTES_MAX, Violation, transmission_flag};
use crate::nbd::stream::Stream;
use crate::nbd::tls::Session;
use crate::{BLOCK_BYTES, SECTOR_BYTES};

/// A client that asks for more options than this has no interest in data.
const OPTIONS_MAX: usize = 64;

/// The number of [`BASE_ALLOCATION`] in block states.
pub(super) const ALLOCATION_CONTEXT: u32 = 1;

/// What was agreed.
pub(super) struct Agreement {
    pub(super) export: Export,
    pub(super) size_bytes: u64,
    /// Replies are structured.
    pub(super) is_structured: bool,
    /// The client may ask for block states.
    pub(super) has_allocation: bool,
}

/// Options so far; encryption forgets them.
#[derive(Default)]
struct Chosen {
    is_structured: bool,
    /// Of which export block states were asked for.
    allocation_of: Option<String>,
    has_no_zeroes: bool,
}

/// Where an option leads.
enum Next {
    Option,
    Encrypt,
    Transmission(Export, ExportInformation, String),
    End,
}

/// Negotiates; none when the client left without opening an export.
///
/// A client keeps its place from when it has shown a certificate, or, where none is wanted, from when it opens an
/// export.
pub(super) fn negotiate(
    shared: &Shared,
    mut stream: Stream,
    keeps_its_place: &AtomicBool,
) -> io::Result<Option<(Stream, Agreement)>> {
    stream.outgoing.write_all(&greeting())?;
    let flags = u32::from_be_bytes(stream.array()?);
    if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
        return Err(Violation::new(format!("unknown client flags {flags:#x}")).into());
    }
    let mut chosen = Chosen { has_no_zeroes: flags & u32::from(NO_ZEROES) != 0, ..Chosen::default() };
    for _ in 0..OPTIONS_MAX {
        let header = OptionHeader::parse(&stream.array()?)?;
        let data = stream.data(header.length, OPTION_BYTES_MAX)?;
        let opens = matches!(header.option, option::GO | option::EXPORT_NAME);
        keeps_its_place.store(stream.is_encrypted || opens && shared.tls.is_none(), Ordering::Release);
        match answer_option(shared, &mut stream, &mut chosen, header.option, &data)? {
            Next::Option => {}
            Next::Encrypt => {
                let config = shared.tls.clone().ok_or_else(|| Violation::new("encryption without certificates"))?;
                stream = stream.encrypt(|socket| Session::answer(config, socket))?;
                chosen = Chosen { has_no_zeroes: chosen.has_no_zeroes, ..Chosen::default() };
            }
            Next::Transmission(export, information, name) => {
                let has_allocation = chosen.is_structured && chosen.allocation_of.as_deref() == Some(&*name);
                let is_structured = chosen.is_structured;
                let size_bytes = information.size_bytes;
                return Ok(Some((stream, Agreement { export, size_bytes, is_structured, has_allocation })));
            }
            Next::End => return Ok(None),
        }
    }
    Err(Violation::new("too many options").into())
}

fn answer_option(
    shared: &Shared,
    stream: &mut Stream,
    chosen: &mut Chosen,
    option: u32,
    data: &[u8],
) -> io::Result<Next> {
    let mut answering = Answering { stream, option };
    if option == option::ABORT {
        // It may have closed the connection already.
        let _ = answering.send(answer::ACK, &[]);
        return Ok(Next::End);
    }
    if option == option::STARTTLS {
        return start_tls(shared, &mut answering, data);
    }
    if shared.tls.is_some() && !answering.stream.is_encrypted {
        if option == option::EXPORT_NAME {
            return Err(Violation::new("a client that does not encrypt").into());
        }
        return answering.refuse(answer::TLS_REQUIRED, "encrypt first: this server wants certificates");
    }
    match option {
        option::EXPORT_NAME => export_name(shared, answering.stream, chosen, data),
        option::LIST => {
            if !data.is_empty() {
                return answering.refuse(answer::INVALID, "LIST takes no data");
            }
            for name in shared.exports.names() {
                let mut entry = (name.len() as u32).to_be_bytes().to_vec();
                entry.extend(name.as_bytes());
                answering.send(answer::SERVER, &entry)?;
            }
            answering.accept()
        }
        option::INFO | option::GO => inform(shared, &mut answering, chosen, data),
        option::STRUCTURED_REPLY => {
            if !data.is_empty() {
                return answering.refuse(answer::INVALID, "STRUCTURED_REPLY takes no data");
            }
            chosen.is_structured = true;
            answering.accept()
        }
        option::LIST_META_CONTEXT | option::SET_META_CONTEXT => contexts(shared, &mut answering, chosen, data),
        _ => answering.refuse(answer::UNSUPPORTED, "unknown option"),
    }
}

/// An option that wants answers.
struct Answering<'a> {
    stream: &'a mut Stream,
    option: u32,
}

impl Answering<'_> {
    fn send(&mut self, kind: u32, data: &[u8]) -> io::Result<()> {
        self.stream.outgoing.write_all(&answer_message(self.option, kind, data))
    }

    fn accept(&mut self) -> io::Result<Next> {
        self.send(answer::ACK, &[]).map(|()| Next::Option)
    }

    fn refuse(&mut self, kind: u32, reason: &str) -> io::Result<Next> {
        self.send(kind, reason.as_bytes()).map(|()| Next::Option)
    }
}

fn start_tls(shared: &Shared, answering: &mut Answering<'_>, data: &[u8]) -> io::Result<Next> {
    if shared.tls.is_none() {
        return answering.refuse(answer::UNSUPPORTED, "this server has no certificates");
    }
    if answering.stream.is_encrypted || !data.is_empty() {
        return answering.refuse(answer::INVALID, "the connection is encrypted already, or data came with STARTTLS");
    }
    answering.send(answer::ACK, &[])?;
    Ok(Next::Encrypt)
}

/// The old way into transmission: it cannot answer with an error.
fn export_name(shared: &Shared, stream: &mut Stream, chosen: &Chosen, data: &[u8]) -> io::Result<Next> {
    let name = parse_name(data)?;
    let information = shared.exports.information(&name).ok_or_else(|| Violation::new("no such export"))?;
    let export = shared.exports.open(&name).map_err(io::Error::other)?;
    let mut reply = information.size_bytes.to_be_bytes().to_vec();
    reply.extend(flags(&export.content, chosen.is_structured).to_be_bytes());
    if !chosen.has_no_zeroes {
        reply.extend([0; ZEROES_BYTES]);
    }
    stream.outgoing.write_all(&reply)?;
    Ok(Next::Transmission(export, information, name))
}

/// `INFO` and `GO`: facts about an export; `GO` also opens it.
fn inform(shared: &Shared, answering: &mut Answering<'_>, chosen: &Chosen, data: &[u8]) -> io::Result<Next> {
    let request = match InformationRequest::parse(data) {
        Ok(request) => request,
        Err(violation) => return answering.refuse(answer::INVALID, &violation.to_string()),
    };
    let Some(information) = shared.exports.information(&request.name) else {
        return answering.refuse(answer::UNKNOWN, "no such export");
    };
    if shared.is_stopping() {
        return answering.refuse(answer::SHUTDOWN, "the server is about to stop");
    }
    let is_go = answering.option == option::GO;
    let export = if is_go { Some(shared.exports.open(&request.name)) } else { None };
    let export = match export.transpose() {
        Ok(export) => export,
        Err(error) => return answering.refuse(answer::UNKNOWN, &error.to_string()),
    };
    let flags = match &export {
        Some(export) => flags(&export.content, chosen.is_structured),
        None => flags_of(information.is_read_only, chosen.is_structured),
    };
    let size = Information::Export { size_bytes: information.size_bytes, flags };
    answering.send(answer::INFO, &size.encode())?;
    let blocks = Information::BlockSize {
        minimum_bytes: SECTOR_BYTES as u32,
        preferred_bytes: BLOCK_BYTES as u32,
        maximum_bytes: PAYLOAD_BYTES_MAX,
    };
    if request.wanted.contains(&Information::BLOCK_SIZE) {
        answering.send(answer::INFO, &blocks.encode())?;
    }
    if request.wanted.contains(&Information::DESCRIPTION) {
        let description = Information::Description(information.description.clone());
        answering.send(answer::INFO, &description.encode())?;
    }
    answering.send(answer::ACK, &[])?;
    Ok(match export {
        Some(export) => Next::Transmission(export, information, request.name),
        None => Next::Option,
    })
}

/// `LIST_META_CONTEXT` and `SET_META_CONTEXT`: there is one context.
fn contexts(shared: &Shared, answering: &mut Answering<'_>, chosen: &mut Chosen, data: &[u8]) -> io::Result<Next> {
    let is_set = answering.option == option::SET_META_CONTEXT;
    if is_set {
        // Whatever comes of it, what was set before holds no more.
        chosen.allocation_of = None;
    }
    if !chosen.is_structured {
        return answering.refuse(answer::INVALID, "block states need structured replies");
    }
    let request = match ContextRequest::parse(data) {
        Ok(request) => request,
        Err(violation) => return answering.refuse(answer::INVALID, &violation.to_string()),
    };
    if shared.exports.information(&request.name).is_none() {
        return answering.refuse(answer::UNKNOWN, "no such export");
    }
    let asks = |query: &String| query == BASE_ALLOCATION || (!is_set && query == "base:");
    if request.queries.iter().any(asks) || (!is_set && request.queries.is_empty()) {
        answering.send(answer::META_CONTEXT, &context_data(ALLOCATION_CONTEXT, BASE_ALLOCATION))?;
        if is_set {
            chosen.allocation_of = Some(request.name);
        }
    }
    answering.accept()
}

fn flags(content: &Content, is_structured: bool) -> u16 {
    flags_of(matches!(content, Content::Source(_)), is_structured)
}

/// What we can do with an export. Several connections see one state: all of it is in the disk.
fn flags_of(is_read_only: bool, is_structured: bool) -> u16 {
    use transmission_flag::{
        CAN_MULTI_CONN, HAS_FLAGS, READ_ONLY, SEND_DF, SEND_FAST_ZERO, SEND_FLUSH, SEND_FUA, SEND_TRIM,
        SEND_WRITE_ZEROES,
    };
    let mut flags = HAS_FLAGS | CAN_MULTI_CONN | SEND_FLUSH;
    flags |= if is_read_only { READ_ONLY } else { SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO };
    if is_structured { flags | SEND_DF } else { flags }
}
