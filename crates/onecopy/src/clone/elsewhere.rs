//! `onecopy clone --to`: the clone is made on another host, which reads the image from this one.

use std::net::{IpAddr, TcpStream};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use onecopy_clone::methods::MethodName;
use onecopy_clone::network::PORT_DEFAULT;
use onecopy_clone::plan::Plan;
use onecopy_host::remote::{CloneOrder, OrderEvent, carried_rules, carried_settings, order_clone};
use onecopy_host::{Event, Progress};
use onecopy_postgres::ConnectionParameters;

use super::source::Source;
use crate::progress::Display;

/// The other host, and this one as it is seen from there.
pub struct Elsewhere<'a> {
    /// `HOST:PORT` of the other host.
    pub address: &'a str,
    /// This host's keys.
    pub keys: &'a Path,
    /// `HOST:PORT` of this host's `onecopy host`.
    pub origin: Option<&'a str>,
}

impl Elsewhere<'_> {
    /// Has the clone made, and tells of it until it is whole.
    pub async fn make(&self, source: &Source, plan: Plan, port: u16, display: &Display) -> anyhow::Result<()> {
        check_password(&source.server.connection)?;
        let origin = self.origin.map_or_else(|| self.own_address(), |origin| Ok(origin.to_owned()))?;
        let directory = plan.target.display().to_string();
        let (settings, left) = carried_settings(&source.settings);
        if !left.is_empty() {
            let left = left.join(", ");
            display.notice(format!("settings of the source that a clone on another host does not have: {left}"));
        }
        let order = CloneOrder {
            source: source.server.data_directory.clone(),
            connection: source.server.connection.clone(),
            leader: source.server.leader.clone(),
            target: plan.target,
            slot: plan.slot,
            recovery: plan.recovery,
            fill: plan.fill,
            origin,
            origin_port: source.port(),
            major_version: source.binaries.major_version(),
            port,
            access_rules: carried_rules(&source.access_rules)?,
            settings,
        };
        let tell = |event| match event {
            OrderEvent::Preparing => display.step(format!("preparing the clone's files on {}", self.address)),
            OrderEvent::Frozen { pause_us } => {
                let pause_ms = pause_us as f64 / 1000.0;
                display.step(format!("the image is taken; the source's accesses waited {pause_ms:.1} ms"));
            }
            OrderEvent::Starting { .. } => display.step(format!("starting the clone on port {port}")),
            OrderEvent::Answering { elapsed_ms } => {
                display.report(Event::Answering { server: directory.clone(), elapsed_ms });
            }
            OrderEvent::Filling(progress) => {
                let (done_bytes, total_bytes) = (progress.filled_bytes, progress.total_bytes);
                display.report(Event::Copying { server: directory.clone(), done_bytes, total_bytes });
            }
        };
        Ok(order_clone(self.address, self.keys, &order, tell).await?)
    }

    /// This host's address on the way to the other one, with the port that is usual.
    fn own_address(&self) -> anyhow::Result<String> {
        let reached = TcpStream::connect(self.address).and_then(|stream| stream.local_addr());
        let own = reached.with_context(|| format!("cannot reach the host {}", self.address))?.ip();
        Ok(match own {
            IpAddr::V4(own) => format!("{own}:{PORT_DEFAULT}"),
            IpAddr::V6(own) => format!("[{own}]:{PORT_DEFAULT}"),
        })
    }
}

/// The clone's server follows by a password: the other host takes no order without one, so this is said before it is
/// asked.
fn check_password(connection: &ConnectionParameters) -> anyhow::Result<()> {
    let has_one = connection.password.as_ref().is_some_and(|password| !password.is_empty());
    ensure!(
        has_one,
        "a clone on another host follows the source by a password, and none is given: set PGPASSWORD to that of the \
         role {} (a role without one gets it by ALTER ROLE .. PASSWORD)",
        connection.user
    );
    Ok(())
}

/// What cannot be had on another host is refused, not left out.
pub fn check_options(method: Option<MethodName>, detach: bool) -> anyhow::Result<()> {
    if let Some(method @ (MethodName::Reflink | MethodName::Copy | MethodName::Fork)) = method {
        bail!(
            "--mode {method} is not possible with --to: a clone on another host is filled while it serves (--mode lazy)"
        );
    }
    ensure!(!detach, "--detach is not possible with --to; Ctrl-C ends the watching only");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_password_nothing_is_ordered() {
        for refused in ["postgresql://me@10.0.0.1:5432/postgres", "postgresql://me:@10.0.0.1:5432/postgres"] {
            let refusal = check_password(&refused.parse().unwrap()).unwrap_err().to_string();
            assert!(refusal.contains("PGPASSWORD") && refusal.contains("role me "), "{refusal}");
        }
        check_password(&"postgresql://me:secret@10.0.0.1:5432/postgres".parse().unwrap()).unwrap();
    }

    #[test]
    fn what_would_be_left_out_is_refused() {
        for method in [MethodName::Reflink, MethodName::Copy] {
            let refusal = check_options(Some(method), false).unwrap_err().to_string();
            assert!(refusal.contains(&format!("--mode {method}")), "{refusal}");
        }
        assert!(check_options(None, true).unwrap_err().to_string().contains("--detach"));
        check_options(None, false).unwrap();
        check_options(Some(MethodName::Lazy), false).unwrap();
    }
}
