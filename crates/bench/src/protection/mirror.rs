//! A disk that QEMU mirrors to another host: a write is done when it is done on both, as with DRBD's protocol C, whose
//! module few machines have. The machine's memory is not sent at all.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::Context;
use onecopy_hypervisor::{Machine, MachineDirectory, Monitor, TimeLimits};
use onecopy_testing::process;
use serde_json::json;

use crate::guests::Guests;

const JOB: &str = "mirror";
const TARGET: &str = "mirror-target";
/// How often it is looked whether the other end listens.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const LISTENS_WITHIN: Duration = Duration::from_secs(10);

/// The other host's end: a raw file, served by QEMU's own NBD server.
#[derive(Debug)]
pub struct Peer {
    /// Where it listens.
    pub address: String,
    serving: Child,
}

impl Peer {
    /// Serves a file of this size, which is made in `directory`.
    ///
    /// # Errors
    /// QEMU's storage daemon is not there, or does not listen.
    pub async fn begin(directory: &Path, bytes: u64) -> anyhow::Result<Peer> {
        let path = directory.join("mirror.raw");
        std::fs::File::create(&path)?.set_len(bytes)?;
        // Free until somebody else takes it, in a network of its own.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("driver=file,node-name=file,filename={}", path.display()));
        command.args(["--blockdev", "driver=raw,node-name=image,file=file", "--nbd-server"]);
        command.arg(format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}"));
        command.args(["--export", "type=nbd,id=export,node-name=image,name=mirror,writable=on"]);
        let peer =
            Peer { address: format!("127.0.0.1:{port}"), serving: command.spawn().context("qemu-storage-daemon")? };
        let listens = async {
            while tokio::net::TcpStream::connect(&peer.address).await.is_err() {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
        };
        tokio::time::timeout(LISTENS_WITHIN, listens).await.context("QEMU's storage daemon does not listen")?;
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.serving.kill();
        let _ = self.serving.wait();
    }
}

/// Mirrors what is written from now on to the NBD server at this address.
///
/// # Errors
/// QEMU refuses it.
pub async fn begin(guests: &Guests, name: &str, to: &str) -> anyhow::Result<()> {
    let (host, port) = to.rsplit_once(':').context("an address")?;
    with_monitor(guests, name, async |monitor| {
        let server = json!({ "type": "inet", "host": host, "port": port });
        let target = json!({ "driver": "nbd", "node-name": TARGET, "server": server, "export": "mirror" });
        monitor.execute("blockdev-add", target).await?;
        let blocks = monitor.execute("query-block", json!({})).await?;
        let blocks = blocks.as_array().context("QEMU lists its disks")?;
        let mut nodes = blocks.iter().filter_map(|block| block["inserted"]["node-name"].as_str());
        let node = nodes.find(|node| *node != TARGET).context("the machine has a disk")?;
        let job = json!({ "job-id": JOB, "device": node, "target": TARGET, "sync": "none",
                          "copy-mode": "write-blocking" });
        monitor.execute("blockdev-mirror", job).await?;
        Ok(())
    })
    .await
}

/// Ends that.
///
/// # Errors
/// QEMU does not.
pub async fn end(guests: &Guests, name: &str) -> anyhow::Result<()> {
    with_monitor(guests, name, async |monitor| {
        monitor.execute("block-job-cancel", json!({ "device": JOB, "force": true })).await?;
        // It ends once nothing is under way.
        while monitor.execute("query-block-jobs", json!({})).await? != json!([]) {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        monitor.execute("blockdev-del", json!({ "node-name": TARGET })).await?;
        Ok(())
    })
    .await
}

/// Its keeper has its monitor, and gets it back.
async fn with_monitor(
    guests: &Guests,
    name: &str,
    run: impl AsyncFnOnce(&Monitor) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let machine = guests.machine(name)?;
    let directory = MachineDirectory::new(machine.home().run())?;
    process::kill(machine.status().await?.keeper_process_id);
    let adopted = Machine::adopt(&directory, TimeLimits::default()).await?.context("the machine does not run")?;
    let ran = run(&adopted.monitor()).await;
    drop(adopted);
    guests.run(&["vm", "start", name])?;
    ran
}
