//! Clients that work while memory goes away under them.

use std::process::Stdio;

use tokio::process::Child;

use crate::server::PgbenchServer;

/// Two runs of pgbench: one reads, one updates.
pub struct Load(Vec<Child>);

impl Load {
    /// Starts them; they end by themselves after some seconds.
    pub fn start(server: &PgbenchServer, seconds: u32) -> Load {
        let run = |script: &str| {
            let seconds = seconds.to_string();
            let arguments = ["-n", "-c", "4", "-T", &seconds, "-b", script];
            let mut command = server.pgbench_command(&arguments);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("pgbench is installed")
        };
        Load(vec![run("select-only"), run("tpcb-like")])
    }

    /// Whether one still runs.
    pub fn runs(&mut self) -> bool {
        self.0.iter_mut().any(|child| child.try_wait().expect("our child").is_none())
    }

    /// Waits for their end. No statement may have failed, and they must have worked.
    pub async fn finish(self) {
        for child in self.0 {
            let output = child.wait_with_output().await.expect("ended");
            let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success() && !errors.contains("ERROR"), "{said}{errors}");
            assert!(said.contains("number of failed transactions: 0 "), "{said}");
            assert!(!said.contains("transactions actually processed: 0\n"), "{said}");
        }
    }
}
