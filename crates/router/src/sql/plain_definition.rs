//! DDL of which no catalog has a say: it runs no code that lies in the database, event triggers aside, and makes
//! nothing that could.
//!
//! What a catalog adds to DDL is whether it runs, or makes something that runs, code that leaves session state. A table
//! of plain columns that is made runs none, whatever the catalog holds, nor does an index of columns. A migration
//! consists of such statements to a good part, each of which would otherwise wait until the catalog is read that the
//! one before has changed.
//!
//! What locks a relation ACCESS EXCLUSIVE that others see is none of it (ALTER TABLE, DROP): a catalog that is read
//! while that lock is held lacks whatever depends on the relation, so it is read before. Nor is what holds existing
//! rows against something: PostgreSQL computes what is constant in the checks and indexes of such a table.

use pg_query::NodeEnum;
use pg_query::protobuf::{ColumnDef, ConstrType, CreateStmt, IndexStmt, Node, PartitionSpec};

use super::facts::Facts;

/// Whether `node`, with its `facts`, is such DDL.
pub(super) fn is_plain(node: &NodeEnum, facts: &Facts) -> bool {
    let calls = !facts.functions.is_empty() || !facts.operators.is_empty() || !facts.attributes.is_empty();
    if calls {
        return false;
    }
    match node {
        NodeEnum::CreateStmt(create) => is_plain_table(create),
        NodeEnum::IndexStmt(index) => is_plain_index(index),
        NodeEnum::CreateSchemaStmt(create) => create.schema_elts.is_empty(),
        NodeEnum::CreateSeqStmt(_)
        | NodeEnum::AlterSeqStmt(_)
        | NodeEnum::CommentStmt(_)
        | NodeEnum::GrantStmt(_)
        | NodeEnum::GrantRoleStmt(_)
        | NodeEnum::AlterDefaultPrivilegesStmt(_)
        | NodeEnum::AlterOwnerStmt(_) => true,
        _ => false,
    }
}

/// Of columns and constraints of its own. A foreign key that cascades deletes rows of this table, which has no triggers
/// as long as the catalog does not know it.
fn is_plain_table(create: &CreateStmt) -> bool {
    let is_own = |element: &Node| match &element.node {
        Some(NodeEnum::ColumnDef(column)) => is_plain_column(column),
        Some(NodeEnum::Constraint(_)) => true,
        _ => false,
    };
    create.inh_relations.is_empty()
        && create.of_typename.is_none()
        && create.partspec.as_ref().is_none_or(is_plain_partitioning)
        && create.table_elts.iter().all(is_own)
}

/// What is generated is planned at once, casts included.
fn is_plain_column(column: &ColumnDef) -> bool {
    let is_generated = |node: &Node| match &node.node {
        Some(NodeEnum::Constraint(constraint)) => constraint.contype == ConstrType::ConstrGenerated as i32,
        _ => true,
    };
    !column.constraints.iter().any(is_generated)
}

fn is_plain_partitioning(partitioning: &PartitionSpec) -> bool {
    partitioning.part_params.iter().all(|parameter| match &parameter.node {
        Some(NodeEnum::PartitionElem(element)) => element.expr.is_none(),
        _ => false,
    })
}

/// Of columns, and of all rows: expressions are computed while it is built.
fn is_plain_index(index: &IndexStmt) -> bool {
    let is_column = |element: &Node| match &element.node {
        Some(NodeEnum::IndexElem(element)) => element.expr.is_none(),
        _ => false,
    };
    index.where_clause.is_none() && index.index_params.iter().all(is_column)
}
