//! Which machines of other hosts may come onto which bridge.

use std::str::FromStr;

use onecopy_machine::{BridgedNetwork, NetworkChoice};

/// A bridge onto which machines of other hosts may come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedBridge {
    pub(super) name: String,
    /// Also those that may send from any card's address.
    pub(super) takes_unfiltered: bool,
}

impl FromStr for AllowedBridge {
    type Err = String;

    /// Understands `NAME[,filter=on|off]`.
    fn from_str(text: &str) -> Result<AllowedBridge, String> {
        let parsed = match text.contains("bridge=") {
            true => Err(format!("{text:?} names more than one bridge; give --bridge again")),
            false => format!("bridge={text}").parse(),
        };
        match parsed {
            Ok(NetworkChoice::Bridged(BridgedNetwork { bridge, mac: None, address: None, gateway: None, filter })) => {
                Ok(AllowedBridge { name: bridge, takes_unfiltered: !filter })
            }
            Ok(_) => Err(format!("{text:?} is not understood; it is NAME[,filter=on|off]")),
            Err(reason) => Err(reason),
        }
    }
}
