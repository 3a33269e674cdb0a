//! What the router knows of one statement: where it must run, what it leaves behind.

use std::ops::Range;

use crate::settings::Reach;

/// One statement of a message, classified against the catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// What the statement does, as far as the router cares.
    pub action: Action,
    /// Bytes of the statement within its message, without the semicolon; leading blanks and comments may be in it.
    /// Meaningful only for the text that was parsed: a message of one statement that came out of the cache under
    /// its fingerprint carries the range of the first text of that fingerprint, so treat a lone statement as the whole
    /// message.
    pub range: Range<usize>,
    /// Session state that the statement leaves on its back end, so that the session cannot share back ends any more.
    pub pins: Option<PinReason>,
    /// Parse may make the present instant of one of its constants: 'now', 'today'.
    pub names_instant: bool,
    /// How far settings reach that it may change for the rest of its transaction, by `set_config` or inside a function.
    pub local_settings: Reach,
    /// Names may mean something else behind it, to who runs it: DDL, what runs code with DDL in it, and DO, which may
    /// hide some.
    pub defines: bool,
    /// Acts on the server that runs it, or on the session there, and not on the data: the leader alone can run it.
    pub acts_on_server: bool,
}

impl Statement {
    /// One of `length` bytes about which nothing is known.
    pub fn unknown(length: usize) -> Statement {
        let (names_instant, local_settings, acts_on_server) = (false, Reach::Nothing, true);
        Statement {
            action: Action::UNKNOWN,
            range: 0..length,
            pins: None,
            names_instant,
            local_settings,
            defines: true,
            acts_on_server,
        }
    }
}

/// What kind of DDL: it is not MVCC, no epoch may be read across it unless it is harmless.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ddl {
    /// Older snapshots stay right while it is under way (CREATE INDEX, ANALYZE, VACUUM, COMMENT, REINDEX, CLUSTER).
    pub harmless: bool,
    /// Cannot run inside a transaction block.
    pub alone: bool,
    /// Whatever it changes for others it locks (TRUNCATE, ALTER TABLE, DROP of relations). If it is harmless, older
    /// snapshots are wrong once it has committed: a new index may lack what only they see, and they may not keep to
    /// what it says is unique.
    pub told_by_locks: bool,
    /// The same at its end, but it waits for older snapshots of its own server itself (CREATE INDEX and REINDEX with
    /// CONCURRENTLY).
    pub indexes_concurrently: bool,
    /// The database that must have no other connection.
    pub database: Option<String>,
}

impl Ddl {
    /// Nobody need do anything about it.
    pub const HARMLESS: Ddl =
        Ddl { harmless: true, alone: false, told_by_locks: false, indexes_concurrently: false, database: None };
}

/// Where a statement must run and what the router must do around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A whitelisted read: right at one epoch, on any server.
    Read {
        /// It depends on the time of its transaction or runs a body that nobody looked into: it must not share a
        /// transaction that is open for long.
        own_transaction: bool,
    },
    /// Must run on the leader.
    Update {
        /// Makes relations, or calls code that may hide DDL (user-defined volatile functions, DO, CALL, user triggers
        /// or rules, files and programs): what it has changed is asked before its COMMIT. Code that may leave session
        /// state is told by [`Statement::pins`].
        opaque: bool,
        /// May write data. False only when that is proven.
        writes: bool,
        /// May commit by itself, so it cannot be wrapped in a transaction and cannot be run again (CALL, DO).
        commits_itself: bool,
    },
    /// DDL and TRUNCATE.
    Ddl(Ddl),
    /// BEGIN and START TRANSACTION.
    Begin(TransactionModes),
    /// COMMIT and END.
    Commit {
        /// AND CHAIN.
        chain: bool,
    },
    /// ROLLBACK and ABORT.
    Rollback {
        /// AND CHAIN.
        chain: bool,
    },
    /// SAVEPOINT name.
    Savepoint(String),
    /// ROLLBACK TO SAVEPOINT name.
    RollbackTo(String),
    /// RELEASE SAVEPOINT name.
    Release(String),
    /// PREPARE TRANSACTION.
    PrepareTransaction,
    /// COMMIT PREPARED, ROLLBACK PREPARED.
    EndPrepared,
    /// SET TRANSACTION (or SET of one of its three settings by name).
    SetTransaction(TransactionModes),
    /// SET TRANSACTION SNAPSHOT.
    SetTransactionSnapshot,
    /// SET SESSION CHARACTERISTICS AS TRANSACTION.
    SetCharacteristics(TransactionModes),
    /// SET of one setting.
    Set {
        /// Canonical name in lower case: `timezone` for TIME ZONE, `client_encoding` for NAMES, `search_path` for
        /// SCHEMA, `role`, `session_authorization`.
        name: String,
        /// SET LOCAL.
        local: bool,
        /// The value when it is one constant; none for lists and anything else.
        value: Option<String>,
    },
    /// RESET name, and SET name TO DEFAULT.
    Reset {
        /// As that of [`Action::Set`].
        name: String,
        /// In which words.
        form: ResetForm,
    },
    /// RESET ALL.
    ResetAll,
    /// SHOW name, canonical as in [`Action::Set`]; `all` for SHOW ALL.
    Show(String),
    /// DISCARD.
    Discard(DiscardTarget),
    /// PREPARE on SQL level.
    Prepare,
    /// EXECUTE on SQL level.
    ExecutePrepared,
    /// DEALLOCATE; the name, or none for ALL.
    Deallocate(Option<String>),
    /// DECLARE CURSOR.
    Declare {
        /// WITH HOLD.
        hold: bool,
        /// Its query is a whitelisted read.
        read: bool,
    },
    /// FETCH, MOVE, CLOSE.
    CursorUse,
    /// LISTEN.
    Listen,
    /// NOTIFY.
    Notify,
    /// UNLISTEN.
    Unlisten,
    /// COPY ... FROM STDIN: runs on the leader, writes.
    CopyIn,
    /// LOAD of a library.
    Load,
    /// LOCK TABLE.
    LockTable,
}

impl Action {
    /// An update about which nothing is known: what to assume of a statement that the parser refuses.
    pub const UNKNOWN: Action = Action::Update { opaque: true, writes: true, commits_itself: true };

    /// Whether the statement may run at an epoch on any server.
    pub fn is_read(&self) -> bool {
        matches!(self, Action::Read { .. })
    }
}

/// What a transaction asks for; none means not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransactionModes {
    /// ISOLATION LEVEL.
    pub isolation: Option<Isolation>,
    /// READ ONLY (true) or READ WRITE (false).
    pub read_only: Option<bool>,
    /// DEFERRABLE (true) or NOT DEFERRABLE (false).
    pub deferrable: Option<bool>,
}

/// The isolation levels by their SQL names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// READ UNCOMMITTED.
    ReadUncommitted,
    /// READ COMMITTED.
    ReadCommitted,
    /// REPEATABLE READ.
    RepeatableRead,
    /// SERIALIZABLE.
    Serializable,
}

impl Isolation {
    /// The level of this name as settings spell it (`read committed`), in any case.
    pub fn from_setting(value: &str) -> Option<Isolation> {
        match value.to_ascii_lowercase().as_str() {
            "read uncommitted" => Some(Isolation::ReadUncommitted),
            "read committed" => Some(Isolation::ReadCommitted),
            "repeatable read" => Some(Isolation::RepeatableRead),
            "serializable" => Some(Isolation::Serializable),
            _ => None,
        }
    }

    /// The name as `SHOW transaction_isolation` prints it.
    pub fn setting(self) -> &'static str {
        match self {
            Isolation::ReadUncommitted => "read uncommitted",
            Isolation::ReadCommitted => "read committed",
            Isolation::RepeatableRead => "repeatable read",
            Isolation::Serializable => "serializable",
        }
    }
}

/// The words by which a setting goes back to its default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetForm {
    /// RESET name.
    Reset,
    /// SET name TO DEFAULT.
    Set,
    /// SET LOCAL name TO DEFAULT.
    SetLocal,
}

impl ResetForm {
    /// The tag of its `CommandComplete`.
    pub fn tag(self) -> &'static str {
        match self {
            ResetForm::Reset => "RESET",
            ResetForm::Set | ResetForm::SetLocal => "SET",
        }
    }
}

/// What DISCARD throws away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardTarget {
    /// DISCARD ALL.
    All,
    /// DISCARD PLANS.
    Plans,
    /// DISCARD SEQUENCES.
    Sequences,
    /// DISCARD TEMP.
    Temporary,
}

/// Why a session must keep its back end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PinReason {
    /// A temporary table, view or sequence.
    TemporaryObject,
    /// LISTEN.
    Listen,
    /// A cursor WITH HOLD.
    HoldableCursor,
    /// A session-level advisory lock.
    AdvisoryLock,
    /// PREPARE on SQL level.
    PreparedStatement,
    /// LOAD.
    Library,
    /// `set_config(.., false)`, `setseed`, and other settings hidden in functions.
    HiddenSetting,
    /// SET ROLE or SET SESSION AUTHORIZATION.
    Identity,
    /// A connection or handle that a function opened (dblink, large objects).
    Handle,
    /// A user's code ran (a function, a trigger, a rule, DO, CALL) that may have left any of these.
    UserCode,
}
