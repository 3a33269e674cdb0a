//! What the kind of a statement says by itself, catalog or not.

use pg_query::NodeEnum;
use pg_query::protobuf::{
    AlterTableCmd, AlterTableStmt, AlterTableType, CreatedbStmt, DeclareCursorStmt, DefElem, DiscardMode, DoStmt,
    DropBehavior, DropStmt, ExplainStmt, Node, ObjectType, RangeVar, ReindexObjectType, ReindexStmt, TransactionStmt,
    TransactionStmtKind, VariableSetKind, VariableSetStmt, a_const,
};

use super::body::Body;
use super::statement::{Action, Ddl, DiscardTarget, Isolation, PinReason, ResetForm, TransactionModes};

/// CURSOR_OPT_HOLD of PostgreSQL's parsenodes.h.
const CURSOR_OPTION_HOLD: i32 = 0x20;

/// DDL that is not on a list below: every epoch must end before it and begin after it.
const DDL: Action = Action::Ddl(Ddl { harmless: false, ..Ddl::HARMLESS });
const DDL_BY_LOCKS: Action = Action::Ddl(Ddl { harmless: false, told_by_locks: true, ..Ddl::HARMLESS });
const DDL_ALONE: Action = Action::Ddl(Ddl { harmless: false, alone: true, ..Ddl::HARMLESS });
const HARMLESS: Action = Action::Ddl(Ddl::HARMLESS);
const HARMLESS_ALONE: Action = Action::Ddl(Ddl { alone: true, ..Ddl::HARMLESS });
const HARMLESS_UNTIL_COMMIT: Action = Action::Ddl(Ddl { told_by_locks: true, ..Ddl::HARMLESS });
const INDEXES_CONCURRENTLY: Action = Action::Ddl(Ddl { alone: true, indexes_concurrently: true, ..Ddl::HARMLESS });
/// Makes relations, for all or for the session alone, or changes temporary ones: nobody else's business before its
/// COMMIT.
const MAKES: Action = Action::Update { opaque: true, writes: true, commits_itself: false };
/// Runs on the leader and changes neither data nor the meaning of a snapshot.
const LEADER: Action = Action::Update { opaque: false, writes: false, commits_itself: false };

/// What the syntax alone says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    /// The catalog does not matter.
    Fixed(Action, Option<PinReason>),
    /// DDL of which the catalog has no say where there are no event triggers.
    DefinesPlainly(Action, Option<PinReason>),
    /// The catalog does not matter for the action, but the statement runs functions, triggers or queries that may leave
    /// session state.
    Runs(Action, Option<PinReason>),
    /// DDL that is not plain, with the code that it defines: what it makes is not in the catalog while its transaction
    /// is open.
    Defines(Action, Option<PinReason>, Box<Body>),
    /// DO.
    Block(Box<Body>),
    /// SELECT, VALUES, TABLE: a read when its facts are clean. `own_transaction`: not to be shared even then.
    Query { own_transaction: bool },
    /// INSERT, UPDATE, DELETE, MERGE.
    Write,
    /// DECLARE CURSOR over a query.
    Cursor { hold: bool },
}

/// The kind of a statement.
pub(super) fn kind(node: &NodeEnum) -> Kind {
    let (action, pins) = match node {
        NodeEnum::SelectStmt(select) if select.into_clause.is_none() => return Kind::Query { own_transaction: false },
        NodeEnum::SelectStmt(select) => {
            let (action, pins) = made_by_query(select.into_clause.as_ref().and_then(|into| into.rel.as_ref()));
            return Kind::Runs(action, pins);
        }
        NodeEnum::CreateTableAsStmt(create) => {
            let (action, pins) = made_by_query(create.into.as_ref().and_then(|into| into.rel.as_ref()));
            return Kind::Runs(action, pins);
        }
        NodeEnum::TruncateStmt(truncate) => {
            let names = truncate.relations.iter().map(|name| match &name.node {
                Some(NodeEnum::RangeVar(name)) => is_temporary(name),
                _ => false,
            });
            let is_own = truncate.behavior != DropBehavior::DropCascade as i32 && names.into_iter().all(|own| own);
            return Kind::Runs(if is_own { MAKES } else { DDL_BY_LOCKS }, None);
        }
        NodeEnum::InsertStmt(_) | NodeEnum::UpdateStmt(_) | NodeEnum::DeleteStmt(_) | NodeEnum::MergeStmt(_) => {
            return Kind::Write;
        }
        NodeEnum::ExplainStmt(explain) => return explained(explain),
        NodeEnum::CopyStmt(copy) => match (copy.is_from, copy.is_program || !copy.filename.is_empty()) {
            (_, true) => {
                return Kind::Runs(Action::Update { opaque: true, writes: true, commits_itself: false }, None);
            }
            (true, false) => return Kind::Runs(Action::CopyIn, None),
            (false, false) if copy.query.as_ref().is_some_and(|query| !is_select(query)) => return Kind::Write,
            (false, false) => return Kind::Query { own_transaction: true },
        },
        NodeEnum::DeclareCursorStmt(declare) => return declared(declare),
        NodeEnum::TransactionStmt(statement) => (transaction(statement), None),
        NodeEnum::VariableSetStmt(statement) => set(statement),
        NodeEnum::VariableShowStmt(show) => (Action::Show(canonical(&show.name)), None),
        NodeEnum::DiscardStmt(discard) => (discarded(discard.target), None),
        NodeEnum::PrepareStmt(_) => (Action::Prepare, Some(PinReason::PreparedStatement)),
        NodeEnum::ExecuteStmt(_) => (Action::ExecutePrepared, None),
        NodeEnum::DeallocateStmt(deallocate) => {
            (Action::Deallocate((!deallocate.isall).then(|| deallocate.name.clone())), None)
        }
        NodeEnum::FetchStmt(_) | NodeEnum::ClosePortalStmt(_) => (Action::CursorUse, None),
        NodeEnum::ListenStmt(_) => (Action::Listen, Some(PinReason::Listen)),
        NodeEnum::NotifyStmt(_) => (Action::Notify, None),
        NodeEnum::UnlistenStmt(_) => (Action::Unlisten, None),
        NodeEnum::LoadStmt(_) => (Action::Load, Some(PinReason::Library)),
        NodeEnum::LockStmt(_) => (Action::LockTable, None),
        NodeEnum::CallStmt(_) => return Kind::Runs(Action::UNKNOWN, None),
        NodeEnum::DoStmt(block) => return Kind::Block(Box::new(code(block))),
        NodeEnum::ConstraintsSetStmt(_) | NodeEnum::CheckPointStmt(_) => (LEADER, None),
        other => {
            let (action, pins) = definition(other);
            return Kind::Defines(action, pins, Box::new(defined_code(other)));
        }
    };
    Kind::Fixed(action, pins)
}

/// Whether a statement runs event triggers: DDL but what concerns all databases, or only maintains. Source:
/// PostgreSQL's `cmdtaglist.h`.
pub(super) fn runs_event_triggers(node: &NodeEnum) -> bool {
    match node {
        NodeEnum::SelectStmt(select) => select.into_clause.is_some(),
        NodeEnum::CreateTableAsStmt(_) => true,
        // With ANALYZE it makes the table.
        NodeEnum::ExplainStmt(explain) => {
            explain.query.as_ref().and_then(|query| query.node.as_ref()).is_some_and(runs_event_triggers)
        }
        NodeEnum::VacuumStmt(_)
        | NodeEnum::ClusterStmt(_)
        | NodeEnum::AlterSystemStmt(_)
        | NodeEnum::CreateRoleStmt(_)
        | NodeEnum::AlterRoleStmt(_)
        | NodeEnum::AlterRoleSetStmt(_)
        | NodeEnum::DropRoleStmt(_)
        | NodeEnum::GrantRoleStmt(_)
        | NodeEnum::ReassignOwnedStmt(_)
        | NodeEnum::CreatedbStmt(_)
        | NodeEnum::AlterDatabaseStmt(_)
        | NodeEnum::AlterDatabaseSetStmt(_)
        | NodeEnum::DropdbStmt(_)
        | NodeEnum::CreateTableSpaceStmt(_)
        | NodeEnum::DropTableSpaceStmt(_)
        | NodeEnum::AlterTableSpaceOptionsStmt(_)
        | NodeEnum::CreateEventTrigStmt(_)
        | NodeEnum::AlterEventTrigStmt(_) => false,
        other => matches!(kind(other), Kind::Defines(..)),
    }
}

/// Whatever defines, changes or maintains objects; what is unknown is a full barrier.
fn definition(node: &NodeEnum) -> (Action, Option<PinReason>) {
    let action = match node {
        // A child of another table is found by whoever reads that.
        NodeEnum::CreateStmt(create) if !create.inh_relations.is_empty() && !names_own(create.relation.as_ref()) => DDL,
        NodeEnum::CreateStmt(create) => return made(create.relation.as_ref()),
        NodeEnum::CreateSeqStmt(create) => return made(create.sequence.as_ref()),
        NodeEnum::ViewStmt(view) if view.replace && !names_own(view.view.as_ref()) => DDL_BY_LOCKS,
        NodeEnum::ViewStmt(view) => return made(view.view.as_ref()),
        NodeEnum::IndexStmt(index) if names_own(index.relation.as_ref()) && !index.concurrent => MAKES,
        NodeEnum::CommentStmt(_) | NodeEnum::CreateStatsStmt(_) => HARMLESS,
        NodeEnum::VacuumStmt(vacuum) if !vacuum.is_vacuumcmd => HARMLESS,
        NodeEnum::VacuumStmt(_) | NodeEnum::AlterSystemStmt(_) => HARMLESS_ALONE,
        NodeEnum::ClusterStmt(cluster) if cluster.relation.is_some() => HARMLESS_UNTIL_COMMIT,
        NodeEnum::ClusterStmt(_) => HARMLESS_ALONE,
        NodeEnum::IndexStmt(index) if index.concurrent => INDEXES_CONCURRENTLY,
        NodeEnum::IndexStmt(_) => HARMLESS_UNTIL_COMMIT,
        NodeEnum::ReindexStmt(reindex) => reindexed(reindex),
        NodeEnum::DropStmt(DropStmt { concurrent: true, .. }) => DDL_ALONE,
        NodeEnum::DropStmt(drop) => dropped(drop),
        NodeEnum::AlterTableStmt(alter) if names_own(alter.relation.as_ref()) => MAKES,
        NodeEnum::AlterTableStmt(alter) => altered(alter),
        NodeEnum::CreateTableSpaceStmt(_)
        | NodeEnum::DropTableSpaceStmt(_)
        | NodeEnum::CreateSubscriptionStmt(_)
        | NodeEnum::AlterSubscriptionStmt(_)
        | NodeEnum::DropSubscriptionStmt(_) => DDL_ALONE,
        NodeEnum::CreatedbStmt(create) => Action::Ddl(Ddl { alone: true, database: template(create), ..Ddl::HARMLESS }),
        // Other databases than the one it is said in: nothing that is read here is touched.
        NodeEnum::DropdbStmt(drop) => {
            Action::Ddl(Ddl { alone: true, database: Some(drop.dbname.clone()), ..Ddl::HARMLESS })
        }
        NodeEnum::AlterDatabaseStmt(alter) => {
            let moves = option(&alter.options, "tablespace").is_some();
            let database = moves.then(|| alter.dbname.clone());
            Action::Ddl(Ddl { harmless: moves, alone: moves, database, ..Ddl::HARMLESS })
        }
        NodeEnum::RenameStmt(rename) if rename.rename_type == ObjectType::ObjectDatabase as i32 => {
            let database = Some(rename.subname.clone());
            Action::Ddl(Ddl { harmless: false, database, ..Ddl::HARMLESS })
        }
        _ => DDL,
    };
    (action, None)
}

/// A new relation. Nobody reads one that the catalog does not know, so it is no barrier: what its name hides is found
/// before its COMMIT. A temporary one concerns nobody else at all, but it ties the session to its back end.
fn made(relation: Option<&RangeVar>) -> (Action, Option<PinReason>) {
    if names_own(relation) {
        let action = Action::Update { opaque: false, writes: true, commits_itself: false };
        (action, Some(PinReason::TemporaryObject))
    } else {
        (MAKES, None)
    }
}

/// As [`made`], with a query of which nothing is known.
fn made_by_query(relation: Option<&RangeVar>) -> (Action, Option<PinReason>) {
    (MAKES, made(relation).1)
}

/// ALTER TABLE. Its locks tell what it changes for readers, but not of a parent that gets a child: the child's rows may
/// be frozen.
fn altered(alter: &AlterTableStmt) -> Action {
    use AlterTableType as T;
    let commands = alter.cmds.iter().filter_map(|node| match &node.node {
        Some(NodeEnum::AlterTableCmd(command)) => Some(command),
        _ => None,
    });
    let is = |command: &AlterTableCmd, kinds: &[T]| kinds.iter().any(|kind| command.subtype == *kind as i32);
    let validates = |command: &AlterTableCmd| is(command, &[T::AtValidateConstraint]);
    // DETACH PARTITION .. CONCURRENTLY is the only form with the flag.
    let is_concurrent = |command: &AlterTableCmd| match command.def.as_deref().and_then(|def| def.node.as_ref()) {
        Some(NodeEnum::PartitionCmd(partition)) => partition.concurrent,
        _ => false,
    };
    if commands.clone().all(|command| validates(command)) {
        return HARMLESS_UNTIL_COMMIT;
    }
    let alone = commands.clone().any(|command| is_concurrent(command));
    let told_by_locks = !alone && !commands.clone().any(|one| is(one, &[T::AtAttachPartition, T::AtAddInherit]));
    Action::Ddl(Ddl { harmless: false, alone, told_by_locks, ..Ddl::HARMLESS })
}

/// DROP. What else depends on a temporary relation may go with it by CASCADE.
fn dropped(drop: &DropStmt) -> Action {
    use ObjectType as O;
    let kinds = [O::ObjectTable, O::ObjectView, O::ObjectSequence, O::ObjectIndex, O::ObjectMatview];
    if !kinds.iter().any(|kind| drop.remove_type == *kind as i32) {
        return DDL;
    }
    let is_own = |object: &Node| match &object.node {
        Some(NodeEnum::List(names)) if names.items.len() > 1 => {
            plain(&names.items[names.items.len() - 2]).is_some_and(|schema| is_temporary_schema(&schema))
        }
        _ => false,
    };
    let all_own = drop.behavior != DropBehavior::DropCascade as i32 && drop.objects.iter().all(is_own);
    if all_own { MAKES } else { DDL_BY_LOCKS }
}

fn names_own(relation: Option<&RangeVar>) -> bool {
    relation.is_some_and(is_temporary)
}

/// Whether the name says that the relation is temporary.
fn is_temporary(name: &RangeVar) -> bool {
    name.relpersistence == "t" || is_temporary_schema(&name.schemaname)
}

/// `pg_temp`, or what stands for it: schemas of other names cannot begin with `pg_`.
fn is_temporary_schema(name: &str) -> bool {
    name.starts_with("pg_temp")
}

/// The code of a DO block.
fn code(block: &DoStmt) -> Body {
    let value = |name: &str| option(&block.args, name).and_then(|option| option.arg.as_deref()).and_then(plain);
    match (value("language").as_deref(), value("as")) {
        (None | Some("plpgsql"), Some(text)) => Body::of(&text),
        _ => Body::unknown(),
    }
}

/// The code that CREATE FUNCTION and CREATE PROCEDURE define; a body of the form BEGIN ATOMIC is part of the tree.
fn defined_code(node: &NodeEnum) -> Body {
    let NodeEnum::CreateFunctionStmt(create) = node else { return Body::default() };
    let language = option(&create.options, "language").and_then(|option| option.arg.as_deref()).and_then(plain);
    let text = option(&create.options, "as").and_then(|option| option.arg.as_deref());
    match (language.as_deref(), text.and_then(|text| text.node.as_ref())) {
        (Some("sql" | "plpgsql"), Some(NodeEnum::List(texts))) => match texts.items.as_slice() {
            [one] => plain(one).map_or_else(Body::unknown, |text| Body::of(&text)),
            _ => Body::unknown(),
        },
        (None | Some("sql"), None) if create.sql_body.is_some() => Body::default(),
        _ => Body::unknown(),
    }
}

fn reindexed(reindex: &ReindexStmt) -> Action {
    let one = [ReindexObjectType::ReindexObjectIndex as i32, ReindexObjectType::ReindexObjectTable as i32];
    let concurrent = is_on(&reindex.params, "concurrently");
    if concurrent {
        return INDEXES_CONCURRENTLY;
    }
    if one.contains(&reindex.kind) { HARMLESS_UNTIL_COMMIT } else { HARMLESS_ALONE }
}

fn template(create: &CreatedbStmt) -> Option<String> {
    let named = option(&create.options, "template").and_then(|option| option.arg.as_deref());
    // DEFAULT is one without a value.
    Some(named.and_then(plain).unwrap_or_else(|| "template1".to_owned()))
}

/// Whether an option is given. Without a value it is on; any value but a plain "off" is taken as on.
fn is_on(options: &[Node], name: &str) -> bool {
    option(options, name).is_some_and(|option| {
        let value = option.arg.as_deref().and_then(plain).unwrap_or_default().to_ascii_lowercase();
        !matches!(value.as_str(), "off" | "false" | "0")
    })
}

fn explained(explain: &ExplainStmt) -> Kind {
    let Some(inner) = explain.query.as_deref().and_then(|query| query.node.as_ref()) else {
        return Kind::Fixed(Action::UNKNOWN, None);
    };
    let analyze = is_on(&explain.options, "analyze");
    match kind(inner) {
        query @ Kind::Query { .. } => query,
        inner if analyze => inner,
        _ => Kind::Fixed(LEADER, None),
    }
}

fn declared(declare: &DeclareCursorStmt) -> Kind {
    let hold = declare.options & CURSOR_OPTION_HOLD != 0;
    if declare.query.as_deref().is_some_and(is_select) {
        Kind::Cursor { hold }
    } else {
        Kind::Fixed(Action::Declare { hold, read: false }, hold.then_some(PinReason::HoldableCursor))
    }
}

fn is_select(node: &Node) -> bool {
    matches!(&node.node, Some(NodeEnum::SelectStmt(_)))
}

fn transaction(statement: &TransactionStmt) -> Action {
    use TransactionStmtKind as K;
    let name = || statement.savepoint_name.clone();
    match K::try_from(statement.kind).unwrap_or(K::Undefined) {
        K::TransStmtBegin | K::TransStmtStart => Action::Begin(modes(&statement.options)),
        K::TransStmtCommit => Action::Commit { chain: statement.chain },
        K::TransStmtRollback => Action::Rollback { chain: statement.chain },
        K::TransStmtSavepoint => Action::Savepoint(name()),
        K::TransStmtRelease => Action::Release(name()),
        K::TransStmtRollbackTo => Action::RollbackTo(name()),
        K::TransStmtPrepare => Action::PrepareTransaction,
        K::TransStmtCommitPrepared | K::TransStmtRollbackPrepared => Action::EndPrepared,
        K::Undefined => Action::UNKNOWN,
    }
}

fn discarded(target: i32) -> Action {
    Action::Discard(match DiscardMode::try_from(target) {
        Ok(DiscardMode::DiscardPlans) => DiscardTarget::Plans,
        Ok(DiscardMode::DiscardSequences) => DiscardTarget::Sequences,
        Ok(DiscardMode::DiscardTemp) => DiscardTarget::Temporary,
        _ => DiscardTarget::All,
    })
}

fn set(statement: &VariableSetStmt) -> (Action, Option<PinReason>) {
    use VariableSetKind as K;
    let name = canonical(&statement.name);
    let local = statement.is_local;
    let identity = (!local && matches!(name.as_str(), "role" | "session_authorization")).then_some(PinReason::Identity);
    match K::try_from(statement.kind).unwrap_or(K::Undefined) {
        K::VarReset => (Action::Reset { name, form: ResetForm::Reset }, None),
        K::VarResetAll => (Action::ResetAll, None),
        K::VarSetMulti => match statement.name.as_str() {
            "TRANSACTION" => (Action::SetTransaction(modes(&statement.args)), None),
            "SESSION CHARACTERISTICS" => (Action::SetCharacteristics(modes(&statement.args)), None),
            "TRANSACTION SNAPSHOT" => (Action::SetTransactionSnapshot, None),
            _ => (Action::UNKNOWN, None),
        },
        K::VarSetDefault => {
            (Action::Reset { name, form: if local { ResetForm::SetLocal } else { ResetForm::Set } }, identity)
        }
        K::VarSetCurrent => (Action::Set { name, local, value: None }, identity),
        K::VarSetValue => {
            let value = match statement.args.as_slice() {
                [one] => plain(one),
                _ => None,
            };
            if let Some(modes) = value.as_deref().and_then(|value| modes_by_name(&name, value)) {
                return (Action::SetTransaction(modes), None);
            }
            (Action::Set { name, local, value }, identity)
        }
        K::Undefined => (Action::UNKNOWN, None),
    }
}

/// `SET transaction_read_only = on` says the same as SET TRANSACTION READ ONLY.
fn modes_by_name(name: &str, value: &str) -> Option<TransactionModes> {
    let switch = || match value.to_ascii_lowercase().as_str() {
        "on" | "true" | "yes" | "1" => Some(true),
        "off" | "false" | "no" | "0" => Some(false),
        _ => None,
    };
    let mut modes = TransactionModes::default();
    match name {
        "transaction_isolation" => modes.isolation = Some(Isolation::from_setting(value)?),
        "transaction_read_only" => modes.read_only = Some(switch()?),
        "transaction_deferrable" => modes.deferrable = Some(switch()?),
        _ => return None,
    }
    Some(modes)
}

fn modes(options: &[Node]) -> TransactionModes {
    let value = |name: &str| option(options, name).and_then(|option| option.arg.as_deref()).and_then(plain);
    let switch = |name: &str| value(name).map(|value| value != "0");
    TransactionModes {
        isolation: value("transaction_isolation").and_then(|value| Isolation::from_setting(&value)),
        read_only: switch("transaction_read_only"),
        deferrable: switch("transaction_deferrable"),
    }
}

/// The last option of this name: PostgreSQL lets the last one win.
fn option<'a>(options: &'a [Node], name: &str) -> Option<&'a DefElem> {
    options.iter().rev().find_map(|node| match &node.node {
        Some(NodeEnum::DefElem(element)) if element.defname == name => Some(element.as_ref()),
        _ => None,
    })
}

/// The text of a single constant or identifier.
fn plain(node: &Node) -> Option<String> {
    match node.node.as_ref()? {
        NodeEnum::String(text) => Some(text.sval.clone()),
        NodeEnum::Integer(number) => Some(number.ival.to_string()),
        NodeEnum::Float(number) => Some(number.fval.clone()),
        NodeEnum::Boolean(truth) => Some(truth.boolval.to_string()),
        NodeEnum::AConst(constant) => match constant.val.as_ref()? {
            a_const::Val::Sval(text) => Some(text.sval.clone()),
            a_const::Val::Ival(number) => Some(number.ival.to_string()),
            a_const::Val::Fval(number) => Some(number.fval.clone()),
            a_const::Val::Boolval(truth) => Some(truth.boolval.to_string()),
            a_const::Val::Bsval(_) => None,
        },
        _ => None,
    }
}

/// Setting names are compared without case; the grammar has already turned TIME ZONE and NAMES into settings.
fn canonical(name: &str) -> String {
    name.to_ascii_lowercase()
}
