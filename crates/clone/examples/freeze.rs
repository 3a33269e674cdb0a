//! How long a source's accesses would wait at a freeze: `freeze [FILES]...`, by default 1000 and 20000 files in 20
//! databases. Needs root. Nothing is started; the directory is made for it and removed. What a caller does while the
//! gate is closed, such as telling the clones' files the final sizes, comes on top.

use std::error::Error;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_clone::fanotify::{Group, Journal};
use onecopy_clone::image::Image;
use onecopy_clone::plan::SourceServer;
use onecopy_clone::source::Source;

const DATABASES: usize = 20;
const FILE_BYTES: u64 = 64 << 10;
const ROUNDS: usize = 5;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut numbers = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<Vec<usize>, _>>()?;
    if numbers.is_empty() {
        numbers = vec![1000, 20_000];
    }
    println!("files     list  open ahead  freeze call  gate closed");
    for files in numbers {
        let directory = tempfile::tempdir()?;
        fabricate(directory.path(), files)?;
        let group = Arc::new(Group::new()?);
        let source = Source::arm(directory.path(), group, Arc::new(Journal::create()?))?;
        source.adopt(&nobody(directory.path())?).await?;
        for _ in 0..ROUNDS {
            let list = timed(|| Image::scan(directory.path()))?.0;
            let ahead = match timed(|| source.prepare()) {
                Ok((ahead, ())) => ahead,
                Err(error) => {
                    println!("{files:5}  {}  {error}", ms(list, 7));
                    break;
                }
            };
            let (call, freezing) = timed(|| source.close_gate())?;
            let pause = freezing.open_gate()?;
            println!("{files:5}  {}  {}  {}  {}", ms(list, 7), ms(ahead, 10), ms(call, 11), ms(pause, 11));
        }
    }
    Ok(())
}

fn ms(time: Duration, width: usize) -> String {
    format!("{:width$.1} ms", time.as_secs_f64() * 1e3, width = width - 3)
}

fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(Duration, T), E> {
    let begin = Instant::now();
    let result = work()?;
    Ok((begin.elapsed(), result))
}

/// A data directory of sparse files.
fn fabricate(directory: &Path, files: usize) -> std::io::Result<()> {
    fs::write(directory.join("PG_VERSION"), "15\n")?;
    for database in 0..DATABASES {
        fs::create_dir_all(directory.join("base").join(database.to_string()))?;
    }
    for file in 0..files {
        let path = directory.join("base").join((file % DATABASES).to_string()).join((16_384 + file).to_string());
        File::create(path)?.set_len(FILE_BYTES)?;
    }
    Ok(())
}

/// No server runs: it is never connected to.
fn nobody(directory: &Path) -> Result<SourceServer, Box<dyn Error>> {
    let connection = "host=/nonexistent user=nobody".parse()?;
    Ok(SourceServer { connection, data_directory: directory.to_owned(), leader: None, replication: None })
}
