//! A client that speaks the wire protocol message by message, so that a test can say each byte.

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::{BufMut, Bytes, BytesMut};
use onecopy_router::authentication::{MECHANISM, ScramClient, ScramCredential};
use onecopy_router::wire::{Address, Channel, ErrorFields, Frame, Reply, Socket, begin_message, end_message};
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};

/// An answer that has not come by then never comes: longer than every bound of the router.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// One connection.
pub struct Wire {
    pub channel: Channel,
    /// Process id and secret, as cancel requests name them.
    pub cancel_key: Bytes,
    /// Settings that were reported at log-in, in order.
    pub reported: Vec<(String, String)>,
}

/// A start-up packet with its length.
pub fn startup(parameters: &[(&str, &str)]) -> Vec<u8> {
    let mut body = (3_u32 << 16).to_be_bytes().to_vec();
    for text in parameters.iter().flat_map(|(name, value)| [name, value]) {
        body.extend_from_slice(text.as_bytes());
        body.push(0);
    }
    body.push(0);
    with_length(&body)
}

/// A packet without a tag.
pub fn with_length(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).expect("packets of tests are short");
    [&length.to_be_bytes(), body].concat()
}

/// One message.
pub fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    [&[tag][..], &with_length(body)].concat()
}

pub fn query(sql: &str) -> Vec<u8> {
    message(b'Q', &[sql.as_bytes(), b"\0"].concat())
}

pub fn parse(name: &str, sql: &str) -> Vec<u8> {
    message(b'P', format!("{name}\0{sql}\0\0\0").as_bytes())
}

/// Bind with parameters; `None` is NULL. All are in the format `parameter_format`, results in `result_format`.
pub fn bind_in(
    portal: &str,
    statement: &str,
    values: &[Option<&[u8]>],
    parameter_format: u16,
    result_format: u16,
) -> Vec<u8> {
    let mut body = BytesMut::new();
    body.put_slice(format!("{portal}\0{statement}\0").as_bytes());
    body.put_u16(1);
    body.put_u16(parameter_format);
    body.put_u16(values.len() as u16);
    for value in values {
        match value {
            Some(value) => {
                body.put_u32(value.len() as u32);
                body.put_slice(value);
            }
            None => body.put_i32(-1),
        }
    }
    body.put_u16(1);
    body.put_u16(result_format);
    message(b'B', &body)
}

/// Bind with text parameters and text results.
pub fn bind(portal: &str, statement: &str, values: &[&str]) -> Vec<u8> {
    let values: Vec<_> = values.iter().map(|value| Some(value.as_bytes())).collect();
    bind_in(portal, statement, &values, 0, 0)
}

pub fn describe(kind: char, name: &str) -> Vec<u8> {
    message(b'D', format!("{kind}{name}\0").as_bytes())
}

pub fn close(kind: char, name: &str) -> Vec<u8> {
    message(b'C', format!("{kind}{name}\0").as_bytes())
}

pub fn execute(portal: &str, rows_max: u32) -> Vec<u8> {
    message(b'E', &[portal.as_bytes(), b"\0", &rows_max.to_be_bytes()].concat())
}

pub fn sync() -> Vec<u8> {
    message(b'S', b"")
}

pub fn flush() -> Vec<u8> {
    message(b'H', b"")
}

/// Parse, Bind, Describe and Execute of one statement, unnamed.
pub fn run_extended(sql: &str, values: &[&str]) -> Vec<u8> {
    [parse("", sql), bind("", "", values), describe('P', ""), execute("", 0)].concat()
}

impl Wire {
    /// Connects to the router and says nothing.
    pub async fn unauthenticated(cluster: &TestCluster) -> anyhow::Result<Wire> {
        let address = cluster.router().local_address();
        let socket = Socket::connect(&Address::of(&address.ip().to_string(), address.port())).await?;
        Ok(Wire { channel: Channel::new(socket, 1 << 30), cancel_key: Bytes::new(), reported: Vec::new() })
    }

    /// Logs in as the tests' role.
    pub async fn connect(cluster: &TestCluster) -> anyhow::Result<Wire> {
        Wire::connect_to(cluster.router().local_address().port()).await
    }

    /// The same on this port: on a server's own, past the router, what one server does is what all are measured by.
    pub async fn connect_to(port: u16) -> anyhow::Result<Wire> {
        Wire::connect_with(port, &[]).await
    }

    /// The same with more parameters at its start.
    pub async fn connect_with(port: u16, parameters: &[(&str, &str)]) -> anyhow::Result<Wire> {
        let socket = Socket::connect(&Address::of("127.0.0.1", port)).await?;
        let wire = Wire { channel: Channel::new(socket, 1 << 30), cancel_key: Bytes::new(), reported: Vec::new() };
        wire.log_in_here(&[&[("user", USER), ("database", DATABASE)], parameters].concat(), PASSWORD)
            .await?
            .map_err(|error| anyhow::anyhow!("the log-in failed with {}: {}", error.code, error.message))
    }

    /// Logs in; what the router refuses is the inner error.
    pub async fn log_in(
        cluster: &TestCluster,
        parameters: &[(&str, &str)],
        password: &str,
    ) -> anyhow::Result<Result<Wire, ErrorFields>> {
        Wire::unauthenticated(cluster).await?.log_in_here(parameters, password).await
    }

    async fn log_in_here(
        mut self,
        parameters: &[(&str, &str)],
        password: &str,
    ) -> anyhow::Result<Result<Wire, ErrorFields>> {
        let wire = &mut self;
        wire.send(&startup(parameters)).await?;
        let client = ScramClient::new(ScramCredential::Password(password.as_bytes().to_vec()));
        let frame = wire.next().await?;
        if frame.tag == b'E' {
            return Ok(Err(ErrorFields::parse(&frame.body())));
        }
        let first = client.client_first();
        let output = &mut wire.channel.output;
        let start = begin_message(output, b'p');
        output.put_slice(MECHANISM.as_bytes());
        output.put_u8(0);
        output.put_u32(first.len() as u32);
        output.put_slice(first.as_bytes());
        end_message(output, start);
        wire.channel.flush().await?;
        let frame = wire.next().await?;
        if frame.tag == b'E' {
            return Ok(Err(ErrorFields::parse(&frame.body())));
        }
        let (_, last) = client.client_final(frame.bytes.get(9..).unwrap_or_default())?;
        wire.channel.output.message(b'p', last.as_bytes());
        wire.channel.flush().await?;
        loop {
            let frame = wire.next().await?;
            match frame.tag {
                b'E' => return Ok(Err(ErrorFields::parse(&frame.body()))),
                b'K' => wire.cancel_key = frame.body(),
                b'S' => {
                    let text = String::from_utf8_lossy(&frame.body()).into_owned();
                    let mut texts = text.split('\0').map(str::to_owned);
                    wire.reported.extend(texts.next().zip(texts.next()));
                }
                b'Z' => return Ok(Ok(self)),
                _ => {}
            }
        }
    }

    pub async fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.channel.output.put_slice(bytes);
        tokio::time::timeout(ANSWER_TIMEOUT, self.channel.flush()).await.context("the router takes nothing")??;
        Ok(())
    }

    /// The next message of the router.
    pub async fn next(&mut self) -> anyhow::Result<Frame> {
        let frame = tokio::time::timeout(ANSWER_TIMEOUT, self.channel.frame()).await;
        Ok(frame.context("the router does not answer")??)
    }

    /// All messages up to `ReadyForQuery`.
    pub async fn answer(&mut self) -> anyhow::Result<Answer> {
        let mut frames = Vec::new();
        loop {
            let frame = self.next().await?;
            let ends = frame.tag == b'Z';
            frames.push(frame);
            if ends {
                return Ok(Answer { frames });
            }
        }
    }

    /// Sends and takes everything up to `ReadyForQuery`.
    pub async fn ask(&mut self, bytes: &[u8]) -> anyhow::Result<Answer> {
        self.send(bytes).await?;
        self.answer().await
    }

    /// A simple query and its whole answer.
    pub async fn query(&mut self, sql: &str) -> anyhow::Result<Answer> {
        self.ask(&query(sql)).await
    }

    /// Everything until the router closes the connection.
    pub async fn until_closed(&mut self) -> anyhow::Result<Answer> {
        let mut frames = Vec::new();
        loop {
            let frame = tokio::time::timeout(ANSWER_TIMEOUT, self.channel.frame()).await;
            match frame.context("the router does not close the connection")? {
                Ok(frame) => frames.push(frame),
                Err(_) => return Ok(Answer { frames }),
            }
        }
    }
}

/// What the router sent.
#[derive(Debug)]
pub struct Answer {
    pub frames: Vec<Frame>,
}

impl Answer {
    /// The messages' types, in order, without changes of parameters.
    pub fn tags(&self) -> String {
        self.frames.iter().map(|frame| frame.tag as char).filter(|tag| *tag != 'S').collect()
    }

    fn of(&self, tag: u8) -> impl Iterator<Item = &Frame> {
        self.frames.iter().filter(move |frame| frame.tag == tag)
    }

    /// The values of all rows; NULL as `None`.
    pub fn rows(&self) -> Vec<Vec<Option<Bytes>>> {
        self.of(b'D').map(|frame| values(&frame.body())).collect()
    }

    /// All rows as text: `a|b` a row, NULL as `~`.
    pub fn text_rows(&self) -> Vec<String> {
        let text = |value: &Option<Bytes>| match value {
            Some(value) => String::from_utf8_lossy(value).into_owned(),
            None => "~".to_owned(),
        };
        self.rows().iter().map(|row| row.iter().map(text).collect::<Vec<_>>().join("|")).collect()
    }

    /// The command tags.
    pub fn commands(&self) -> Vec<String> {
        self.of(b'C').map(|frame| String::from_utf8_lossy(&frame.body()).trim_end_matches('\0').to_owned()).collect()
    }

    /// The errors.
    pub fn errors(&self) -> Vec<ErrorFields> {
        self.of(b'E').map(|frame| ErrorFields::parse(&frame.body())).collect()
    }

    /// The only error's SQLSTATE; `00000` when there is none.
    pub fn code(&self) -> String {
        match self.errors().as_slice() {
            [] => "00000".to_owned(),
            [error] => error.code.clone(),
            several => panic!("one error is due, not {several:?}"),
        }
    }

    /// The fields of the first error or notice, by their one-letter names.
    pub fn fields(&self, tag: u8) -> anyhow::Result<Vec<(char, String)>> {
        let frame = self.of(tag).next().context("there is none")?;
        let body = frame.body();
        let fields = body.split(|byte| *byte == 0).filter(|field| !field.is_empty());
        Ok(fields.map(|field| (field[0] as char, String::from_utf8_lossy(&field[1..]).into_owned())).collect())
    }

    /// What `ReadyForQuery` said last: I, T or E.
    pub fn status(&self) -> anyhow::Result<char> {
        match self.frames.last() {
            Some(frame) if frame.tag == b'Z' => Ok(frame.body()[0] as char),
            last => bail!("the answer ends with {last:?}"),
        }
    }
}

fn values(body: &Bytes) -> Vec<Option<Bytes>> {
    let mut values = Vec::new();
    let mut place = 2;
    while let Some(length) = body.get(place..place + 4) {
        let length = i32::from_be_bytes(length.try_into().expect("four bytes"));
        place += 4;
        values.push(usize::try_from(length).ok().map(|length| {
            let value = body.slice(place..place + length);
            place += length;
            value
        }));
    }
    values
}

/// Runs `sql`, which must give these rows.
pub async fn expect(wire: &mut Wire, sql: &str, rows: &[&str]) -> anyhow::Result<()> {
    let answer = wire.query(sql).await?;
    assert_eq!(
        (answer.code().as_str(), answer.text_rows()),
        ("00000", rows.iter().map(|row| (*row).to_owned()).collect()),
        "{sql}"
    );
    Ok(())
}
